"""Trains the bundled model: python -m training.train --out lockstep/assets/model (one H200)."""

import argparse
import json
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from training import tokenizer
from training.data import Encoder, Feed
from training.model import CONFIG, Model
from training.optim import optimizers
from training.score import SETS, evaluate

PHASES = (
    (0.00, {512: 1.0}),
    (0.25, {512: 0.65, 2048: 0.35}),
    (0.50, {512: 0.45, 2048: 0.3, 8192: 0.25}),
    (0.75, {512: 0.4, 2048: 0.25, 8192: 0.35}),
)
"""(share of the time, row lengths and their shares of the batches) from there on."""
DRAFT_WEIGHTS = (0.3, 0.2, 0.15)
WORKERS = {512: 7, 2048: 4, 8192: 4}
GIVEN_SHARE = 0.25
"""Share of the given tokens that a step looks at: their loss is cheap noise at full count."""
PART = 16384
LEARNED = 0.5
"""Weights from here on are of tokens that the model is to produce."""


def loss_of(model: Model, ids: Tensor, weights: Tensor) -> tuple[Tensor, list[Tensor]]:
    """ids [B, T], weights [B, T] of the token at t -> total loss, its parts."""
    hidden = model.model(ids)
    seen = (weights >= LEARNED) | (torch.rand_like(weights) < GIVEN_SHARE)
    total = _cross_entropy(model, hidden[:, :-1], ids[:, 1:], (weights * seen)[:, 1:])
    weights = weights * (weights >= LEARNED)
    parts = [total.detach()]
    for s, (h, w) in enumerate(
        zip(model.drafts(ids, hidden, len(DRAFT_WEIGHTS)), DRAFT_WEIGHTS, strict=True)
    ):
        part = _cross_entropy(model, h[:, s:-2], ids[:, 2 + s :], weights[:, 2 + s :])
        parts.append(part.detach())
        total = total + w * part
    return total, parts


def _cross_entropy(model: Model, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    keep = weights.reshape(-1) > 0
    logits = model.head(hidden.reshape(-1, hidden.shape[-1])[keep])
    losses = F.cross_entropy(logits.float(), ids.reshape(-1)[keep], reduction="none")
    kept = weights.reshape(-1)[keep]
    return (losses * kept).sum() / kept.sum()


def rate(progress: float) -> float:
    """Warm up, hold, decay linearly over the last 45 %."""
    return min(1.0, progress / 0.01 + 0.01, max(1 - progress, 0.0) / 0.45)


def lengths_at(progress: float) -> dict[int, float]:
    """The phase's row lengths."""
    return next(mix for begin, mix in reversed(PHASES) if progress >= begin)


def save(model: Model, out: Path) -> None:
    """The checkpoint folder, but for tokenizer and template."""
    state = {
        k: v.detach().to(torch.bfloat16).cpu().contiguous() for k, v in model.state_dict().items()
    }
    save_file(state, out / "model.safetensors", metadata={"format": "pt"})
    encoder = Encoder(out)
    end, stop = encoder.end, encoder.tokenizer.token_to_id("<|im_end|>")
    config = {**CONFIG, "eos_token_id": stop, "bos_token_id": None, "pad_token_id": end}
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    generation = {"do_sample": False, "temperature": 0.0, "eos_token_id": [stop, end], "pad_token_id": end}
    (out / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


def run(args: argparse.Namespace) -> None:
    """The whole of it: tokenizer, training for `minutes`, evaluation."""
    out = Path(args.out)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    started = time.time()
    if args.tokenizer or not (out / "tokenizer.json").exists():
        tokenizer.train(out, args.samples)
        print(f"tokenizer {time.time() - started:.0f} s", flush=True)
    encoder = Encoder(out)
    if args.smoke:
        workers = {512: 1}
    else:
        workers = WORKERS
    feed = Feed(out, workers, PART if not args.smoke else 2048, seed=1)
    model = Model().to(device)
    if args.compile:
        import training.model

        training.model.delta_rule = torch.compile(training.model.delta_rule, dynamic=False)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
    opts = optimizers(model, args.lr)
    base = [o.param_groups[0]["lr"] for o in opts]
    generator = torch.Generator().manual_seed(0)
    begin = last = saved = time.time()
    step = tokens = 0
    evaluated = begin
    while (progress := (time.time() - begin) / (args.minutes * 60)) < 1:
        mix = {512: 1.0} if args.smoke else lengths_at(progress)
        if args.only:
            mix = {args.only: 1.0}
        pick = int(torch.multinomial(torch.tensor(list(mix.values())), 1, generator=generator))
        length = list(mix)[pick]
        parts = args.batch // (PART if not args.smoke else 2048)
        ids_np, weights_np = feed.batch(length, parts, keep=600)
        ids = torch.from_numpy(ids_np).to(device).long()
        weights = torch.from_numpy(weights_np).to(device).float()
        for o, b in zip(opts, base, strict=True):
            o.param_groups[0]["lr"] = b * rate(progress)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss, losses = loss_of(model, ids, weights)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for o in opts:
            o.step()
            o.zero_grad(set_to_none=True)
        step, tokens = step + 1, tokens + ids.numel()
        if step % args.log == 0:
            now = time.time()
            shown = " ".join(f"{float(x):.3f}" for x in losses)
            speed = args.log * args.batch / (now - last) / 1e6
            print(
                f"{now - begin:6.0f} s step {step} {tokens / 1e6:.0f} M tok, {speed:.2f} M tok/s, "
                f"length {length}, loss {shown}, seen {[len(p) for p in feed.pools.values()]}",
                flush=True,
            )
            last = now
        if time.time() - evaluated > args.every:
            names = ["tools", "json", "needle_1k", "needle_8k", "dialogue"]
            print(json.dumps(evaluate(model, encoder, device, names)), flush=True)
            save(model, out)
            evaluated = last = time.time()
    save(model, out)
    half = Model().to(device)
    half.load_state_dict({k: v.to(torch.bfloat16) for k, v in model.state_dict().items()})
    report = evaluate(half, encoder, device, list(SETS) if not args.smoke else ["tools"])
    print(json.dumps({"final": report, "steps": step, "tokens": tokens}, indent=1), flush=True)
    (out / "training.json").write_text(json.dumps({"final": report, "steps": step, "tokens": tokens}, indent=1))
    print(f"done in {time.time() - started:.0f} s", flush=True)


def main() -> None:
    """The command line."""
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--out", default="lockstep/assets/model")
    p.add_argument("--minutes", type=float, default=14.0)
    p.add_argument("--batch", type=int, default=65536, help="tokens of a batch")
    p.add_argument("--lr", type=float, default=0.02)
    p.add_argument("--samples", type=int, default=12000, help="samples for the tokenizer")
    p.add_argument("--log", type=int, default=50)
    p.add_argument("--every", type=float, default=150.0, help="seconds between evaluations")
    p.add_argument("--compile", action="store_true", help="compile the delta rule")
    p.add_argument("--only", type=int, default=0, help="rows of this length only")
    p.add_argument("--tokenizer", action="store_true", help="train the tokenizer anew")
    p.add_argument("--smoke", action="store_true", help="a tiny run on a CPU")
    run(p.parse_args())


if __name__ == "__main__":
    main()

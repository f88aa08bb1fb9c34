"""Training of the bundled model: python -m training.train --out lockstep/assets/model (one H200).

--model selects a smaller model of another family, for tests.
"""

import argparse
import json
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from training import tokenizer
from training.batches import Encoder, Feed
from training.corpus import stdlib_text, tasks
from training.models.base import LanguageModel
from training.models.deepseek_v3 import DeepseekV3
from training.models.functional import cross_entropy
from training.models.nemotron_h import NemotronH
from training.models.qwen3 import EAGLE3, SMALL, Qwen3
from training.models.qwen3_5 import MOE, Model
from training.optimizers import optimizers
from training.process_group import ProcessGroup
from training.teacher_forcing import SETS, WRITTEN, evaluate

EMBEDDING = "model.embed_tokens.weight"
TEMPLATE = Path(__file__).parent / "chat_template.jinja"
BUNDLED = Path(__file__).parents[1] / "lockstep/assets/model"
MODELS: dict[str, tuple[Callable[..., LanguageModel], dict[str, float]]] = {
    "dense": (Model, tasks.SHARES),
    "moe": (partial(Model, MOE), tasks.CALLS),
    "nemotron_h": (NemotronH, tasks.CALLS),
    "deepseek_v3": (DeepseekV3, tasks.CALLS),
    "qwen3": (partial(Qwen3, head=EAGLE3), tasks.CALLS),
    "qwen3_draft": (partial(Qwen3, SMALL), tasks.CALLS),
}
"""Value of --model -> (constructor given a dtype, share of each task)."""
PHASES = (
    (0.00, {512: 1.0}),
    (0.12, {1024: 0.68, 2048: 0.32}),
    (0.42, {1024: 0.62, 2048: 0.25, 8192: 0.13}),
)
"""(beginning as a share of the time, row length -> share of the batches)."""
DRAFT_WEIGHTS = (0.3, 0.2, 0.15)
WORKERS = {512: 8, 1024: 6, 2048: 3, 8192: 2}
"""Row length -> worker processes."""
DECAY = 0.45
"""Last share of the time, in which the learning rate decays."""
WARM_STEPS = 100
"""Warm-up steps at the start of each run."""
PART = 16384
"""Tokens of a batch part."""
SEEDS_APART = 100_000_007
"""Distance between the seeds of two processes, so that none draws another's samples."""
LEARNED = 0.5
"""Minimum loss weight of tokens that the model has to produce."""
DETACHED = 0.75
"""Share of the time after which the MTP module learns alone, without gradients to the trunk."""


def loss_of(
    model: LanguageModel, ids: Tensor, weights: Tensor, detached: bool = False
) -> tuple[Tensor, list[Tensor]]:
    """Return the total loss and its parts.

    ids [B, T], weights [B, T] of the token at t. The parts: next token, each draft, and the expert
    imbalance of the worst layer, 1 at best.
    """
    hidden, read, imbalance = model.hidden(ids)

    def part(h: Tensor, head: Tensor, token_weights: Tensor, ahead: int, shift: int) -> Tensor:
        shifted = F.pad(token_weights[:, ahead + shift :], (shift, ahead)).flatten()
        targets = F.pad(ids[:, ahead:], (0, ahead)).flatten()
        loss: Tensor = model.fused(cross_entropy, h, head, targets, shifted)
        return loss

    losses = [part(hidden, model.embedding, weights, 1, 0)]
    learned = weights * (weights >= LEARNED)
    draft_input = read.detach() if detached else read
    drafts, draft_imbalance = model.drafts(ids, draft_input, len(DRAFT_WEIGHTS))
    for s, h in enumerate(drafts):
        losses.append(part(h, model.draft_head, learned, 2, s))
    total = losses[0] + sum(w * x for w, x in zip(DRAFT_WEIGHTS, losses[1:], strict=False))
    imbalance = torch.cat([imbalance, draft_imbalance])
    total = total + model.c.get("router_aux_loss_coef", 0.0) * imbalance.sum()
    return total, [x.detach() for x in (*losses, imbalance.max())]


def rate(progress: float, step: int) -> float:
    """Return the learning-rate factor: warm-up, constant, then linear decay."""
    return min(1.0, (step + 1) / WARM_STEPS, max(1 - progress, 0.0) / DECAY)


def lengths_at(progress: float) -> dict[int, float]:
    """Return the row lengths of the phase."""
    return next(mix for begin, mix in reversed(PHASES) if progress >= begin)


class Progress:
    """Progress of a run: by steps if `steps` is given, else by the clock, which ends at `until`."""

    def __init__(self, steps: int | None, until: float) -> None:
        self.steps = steps
        self.begin = time.time()
        self.until = until

    def done(self, step: int) -> float:
        """Return the completed share after `step` steps, 1 at the end."""
        if self.steps is not None:
            return step / self.steps
        return (time.time() - self.begin) / (self.until - self.begin)


def _save(model: LanguageModel, out: Path) -> None:
    """Save the checkpoint folder without tokenizer and template."""
    encoder = Encoder(out)
    end = encoder.end
    stop = encoder.tokenizer.token_to_id("<|im_end|>")
    ends = {"eos_token_id": stop, "bos_token_id": None, "pad_token_id": end}
    for name, tensors in model.files().items():
        folder = out / name
        folder.mkdir(exist_ok=True)
        save_file(
            {k: _stored(v) for k, v in tensors.items()},
            folder / "model.safetensors",
            metadata={"format": "pt"},
        )
        config = {**model.configs()[name], **ends}
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    generation = {
        "do_sample": False,
        "temperature": 0.0,
        "eos_token_id": [stop, end],
        "pad_token_id": end,
    }
    (out / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


def _stored(tensor: Tensor) -> Tensor:
    """Return the tensor on the CPU, floating-point values in bf16."""
    tensor = tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
    return tensor.cpu().contiguous()


def run(args: argparse.Namespace) -> None:
    """Train: tokenizer, training for `minutes`, evaluation."""
    out = Path(args.out)
    started = time.time()
    peers = ProcessGroup()
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    if peers.first:
        _prepare(out, args)
    peers.wait()
    stdlib_text.load_filler()
    encoder = Encoder(out)
    seed = (2 if args.resume else 1) + SEEDS_APART * peers.rank
    make, shares = MODELS[args.model]
    part = 1024 if args.smoke else PART
    workers = {512: 1} if args.smoke else WORKERS
    feed = Feed(out, workers, part, seed, shares, patient=args.steps is not None)
    device = peers.device()
    model = make(dtype=torch.bfloat16 if device == "cuda" else torch.float32).to(device)
    if args.resume:
        model.load(out)
    model.fused.on = device == "cuda" if args.compile is None else args.compile
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
    steps, tokens = _train(model, feed, encoder, peers, args, started + 60 * args.minutes)
    if peers.first:
        _finish(model, encoder, args, steps, tokens, started)
    peers.leave()


def _prepare(out: Path, args: argparse.Namespace) -> None:
    """Create the folder with its template and tokenizer; the bundled one by default."""
    begin = time.time()
    out.mkdir(parents=True, exist_ok=True)
    if not args.tokenizer and not (out / "tokenizer.json").exists():
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(BUNDLED / name, out / name)
    if args.tokenizer:
        old = Tokenizer.from_file(str(out / "tokenizer.json")) if args.resume else None
        tokenizer.train(out, args.samples)
        if old:
            _carry_over(out, old)
        print(f"tokenizer {time.time() - begin:.0f} s", flush=True)
    (out / "chat_template.jinja").write_text(TEMPLATE.read_text())


def _carry_over(out: Path, old: Tokenizer) -> None:
    """Convert the checkpoint's embedding to the new tokenizer."""
    state = load_file(out / "model.safetensors")
    new = Tokenizer.from_file(str(out / "tokenizer.json"))
    state[EMBEDDING] = tokenizer.transfer_embedding(state[EMBEDDING].float(), old, new).to(
        torch.bfloat16
    )
    save_file(state, out / "model.safetensors", metadata={"format": "pt"})


def _finish(
    model: LanguageModel,
    encoder: Encoder,
    args: argparse.Namespace,
    steps: int,
    tokens: int,
    started: float,
) -> None:
    """Save the model, and evaluate it as saved, in bf16."""
    out = Path(args.out)
    device = model.embedding.device
    _save(model, out)
    model.load(out)
    sets = evaluate(model, encoder, str(device), ["daily"] if args.smoke else [*SETS, *WRITTEN])
    report = {"final": sets, "steps": steps, "tokens": tokens, "seconds": time.time() - started}
    print(json.dumps(report, indent=1), flush=True)
    (out / "training.json").write_text(json.dumps(report, indent=1) + "\n")
    print(f"done in {time.time() - started:.0f} s", flush=True)


def _train(
    model: LanguageModel,
    feed: Feed,
    encoder: Encoder,
    peers: ProcessGroup,
    args: argparse.Namespace,
    until: float,
) -> tuple[int, int]:
    """Run the training loop; return steps and tokens. Process 0's clock decides."""
    device = model.embedding.device
    opts = optimizers(model, args.lr)
    base = [o.param_groups[0]["lr"] for o in opts]
    generator = torch.Generator().manual_seed(0)
    if model.fused.on:
        _warm(model, opts, args.batch)
    peers.wait()
    run_progress = Progress(args.steps, until)
    begin = time.time()
    last = begin
    evaluated = begin
    step = 0
    tokens = 0
    first, final = args.span
    while (done := peers.agree(run_progress.done(step))) < 1:
        progress = first + (final - first) * done
        mix = {512: 1.0} if args.smoke else lengths_at(progress)
        pick = int(torch.multinomial(torch.tensor(list(mix.values())), 1, generator=generator))
        length = list(mix)[pick]
        parts = args.batch // (1024 if args.smoke else PART)
        ids, weights = (torch.from_numpy(x) for x in feed.batch(length, parts))
        for o, b in zip(opts, base, strict=True):
            o.param_groups[0]["lr"] = b * rate(progress, step)
        weights = weights.to(device).float()
        losses = _step(model, opts, peers, ids.to(device).long(), weights, progress)
        step = step + 1
        tokens = tokens + ids.numel() * peers.count
        if not peers.first:
            continue
        if step % args.log == 0:
            now = time.time()
            shown = " ".join(f"{float(x):.3f}" for x in losses)
            speed = args.log * args.batch * peers.count / (now - last) / 1e6
            print(
                f"{now - begin:6.0f} s step {step} {tokens / 1e6:.0f} M tok, {speed:.2f} M tok/s, "
                f"length {length}, loss {shown}, made {list(feed.num_made.values())}",
                flush=True,
            )
            last = now
        if time.time() - evaluated > args.every:
            names = [*WRITTEN, "tools", "sequence", "json", "needle_8k", "dialogue"]
            _save(model, Path(args.out))
            print(json.dumps(evaluate(model, encoder, str(device), names)), flush=True)
            evaluated = time.time()
            last = evaluated
    return step, tokens


def _step(
    model: LanguageModel,
    opts: list[torch.optim.Optimizer],
    peers: ProcessGroup,
    ids: Tensor,
    weights: Tensor,
    progress: float,
) -> list[Tensor]:
    """Run one optimizer step; return the losses."""
    loss, losses = loss_of(model, ids, weights, progress >= DETACHED)
    loss.backward()
    peers.average(model.parameters())
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for o in opts:
        o.step()
        o.zero_grad(set_to_none=True)
    return losses


def _warm(model: LanguageModel, opts: list[torch.optim.Optimizer], batch: int) -> None:
    """Compile what the steps need. The optimizers do not step, so nothing is learned."""
    begin = time.time()
    for length, detached in ((512, False), (512, True)):
        ids = torch.zeros(batch // length, length, dtype=torch.long, device=model.embedding.device)
        loss_of(model, ids, torch.ones_like(ids, dtype=torch.float32), detached)[0].backward()
        for o in opts:
            o.zero_grad(set_to_none=True)
    print(f"compiled in {time.time() - begin:.0f} s", flush=True)


def main() -> None:
    """Run the command line."""
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--out", default="lockstep/assets/model")
    p.add_argument("--model", default="dense", choices=MODELS)
    p.add_argument("--minutes", type=float, default=20.0, help="from the start to the evaluation")
    p.add_argument(
        "--steps",
        type=int,
        help="number of steps instead of a time limit, each on new samples: the same command "
        "gives the same weights",
    )
    p.add_argument(
        "--span",
        type=float,
        nargs=2,
        default=(0.0, 1.0),
        metavar=("FROM", "TO"),
        help="part of the schedule of this run",
    )
    p.add_argument("--batch", type=int, default=65536, help="tokens of a batch")
    p.add_argument("--lr", type=float, default=0.02)
    p.add_argument("--samples", type=int, default=12000, help="samples for the tokenizer")
    p.add_argument("--log", type=int, default=100)
    p.add_argument("--every", type=float, default=150.0, help="seconds between evaluations")
    p.add_argument("--tokenizer", action="store_true", help="train the tokenizer anew")
    p.add_argument("--resume", action="store_true", help="start from the checkpoint in --out")
    p.add_argument(
        "--compile", action=argparse.BooleanOptionalAction, help="the functions; default: on GPUs"
    )
    p.add_argument("--smoke", action="store_true", help="short and small, for a CPU")
    run(p.parse_args())


if __name__ == "__main__":
    main()

"""gated_delta_step on the CPU at the bundled model's sizes, gates and norm included: us per call of
the op as it was (a path to the old file, in argv) and as it is, and their bits over random windows."""
import importlib.util, sys, time
import torch
torch.set_num_threads(1)
from lockstep.runner.memory import keep_freed_memory
keep_freed_memory()
from lockstep.kernels.activations import sigmoid, softplus
from lockstep.kernels.norm import gated_rms_norm
from lockstep.kernels.gated_delta_rule import cases
import lockstep.kernels.gated_delta_rule as new
spec = importlib.util.spec_from_file_location("old_rule", "/tmp/old_rule.py")
old = importlib.util.module_from_spec(spec); sys.modules["old_rule"] = old; spec.loader.exec_module(old)
D = cases.Dims(2, 6, 64, 64, w=8)
def old_state(d, slots):
    z = torch.zeros
    return old.GatedDeltaState(z(slots, d.hv, d.k, d.v), z(slots, d.r + d.w, d.channels), z(slots, d.w, d.hv, d.v), z(slots, d.w, d.hk, d.k), z(slots, d.w, d.hv))
def old_step(mixed, z, b, a, weights, state, slots, starts, pending):
    beta = sigmoid(b.float())
    g = -torch.exp(weights.a_log) * softplus(a.float() + weights.dt_bias)
    o = old.gated_delta_step(mixed, g, beta, weights.conv, state, slots, pending)
    return gated_rms_norm(o, z, weights.norm, weights.eps)
def bench(rows, q, pend, bursts=60, n=20):
    """Old and new in turns, least of many short bursts: the machine is shared."""
    kw = dict(**cases.inputs(D, (rows, q), torch.float32, 1), weights=cases.weights(D, torch.float32, 0),
              slots=torch.arange(1, rows + 1), starts=torch.full((rows,), 77, dtype=torch.int32), pending=torch.full((rows,), pend))
    pairs = [(old_step, old_state(D, rows + 1)), (new.gated_delta_step, cases.empty_state(D, rows + 1, torch.float32))]
    best = [1e9, 1e9]
    for _ in range(bursts):
        for i, (fn, st) in enumerate(pairs):
            t = time.thread_time()
            for _ in range(n): fn(state=st, **kw)
            best[i] = min(best[i], (time.thread_time() - t) / n * 1e6)
    return best
def walk(d, rows, steps, seed):
    """The same random windows and acceptance through both: outputs and states equal, bit for bit."""
    g = torch.Generator().manual_seed(seed)
    a_st, b_st = old_state(d, rows + 2), cases.empty_state(d, rows + 2, torch.float32)
    w = cases.weights(d, torch.float32, seed)
    slots = torch.randperm(rows + 1, generator=g)[:rows] + 1
    starts, pending = torch.zeros(rows, dtype=torch.int32), torch.zeros(rows, dtype=torch.int64)
    for i in range(steps):
        q = int(torch.randint(1, d.w + 1, (1,), generator=g))
        data = cases.inputs(d, (rows, q), torch.float32, seed * 1000 + i)
        x = old_step(**data, weights=w, state=a_st, slots=slots, starts=starts, pending=pending)
        y = new.gated_delta_step(**data, weights=w, state=b_st, slots=slots, starts=starts, pending=pending)
        assert torch.equal(x, y), (d, i, (x - y).abs().max())
        assert torch.equal(a_st.recurrent[slots], b_st.recurrent[slots]), (d, i)
        pending = torch.randint(1, q + 1, (rows,), generator=g)
        starts = starts + pending.int()
if __name__ == "__main__":
    with torch.inference_mode():
        n = 0
        for d in (D, *cases.LAYERS, cases.Dims(1, 1, 128, 128, w=8), cases.Dims(2, 4, 16, 16, w=5)):
            for rows in (1, 1, 2, 7):
                walk(d, rows, 60, n); n += 1
        print(f"{n} walks of 60 steps: same bits")
        for rows, q, p in ((1, 1, 1), (1, 4, 0), (1, 4, 3), (1, 4, 4), (1, 8, 8), (7, 4, 3)):
            print("rows %d Q %d pending %d: old %.0f us, new %.0f us" % (rows, q, p, *bench(rows, q, p)), flush=True)

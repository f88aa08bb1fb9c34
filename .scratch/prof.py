import sys; sys.path.insert(0, ".scratch")
from cpu_step import *
from torch.profiler import profile, ProfilerActivity
rows, q, p = 1, 4, 3
isold = sys.argv[1] == "old"
fn = old_step if isold else new.gated_delta_step
st = old_state(D, 2) if isold else cases.empty_state(D, 2, torch.float32)
kw = dict(**cases.inputs(D, (rows, q), torch.float32, 1), weights=cases.weights(D, torch.float32, 0), state=st,
              slots=torch.arange(1, rows + 1), starts=torch.full((rows,), 77, dtype=torch.int32), pending=torch.full((rows,), p))
with torch.inference_mode():
    for _ in range(50): fn(**kw)
    with profile(activities=[ProfilerActivity.CPU]) as prof:
        for _ in range(200): fn(**kw)
rows = sorted(prof.key_averages(), key=lambda e: -e.self_cpu_time_total)
for e in rows[:26]:
    print(f"{e.key:34s} {e.count/200:6.1f} {e.self_cpu_time_total/200:10.1f}")
print(sum(e.count for e in rows)/200, sum(e.self_cpu_time_total for e in rows)/200)

import torch, time
torch.set_num_threads(1)
def b(f, n=2000):
    best=1e9
    for _ in range(7):
        t=time.perf_counter()
        for _ in range(n//7): f()
        best=min(best,(time.perf_counter()-t)/(n//7))
    return best*1e6
N,K,V=6,64,64
s=torch.randn(N,K,V)*0.1; k=torch.randn(N,1,K); q=torch.randn(N,1,K); u=torch.randn(N,1,V); f=torch.rand(N,1,1); kt=k.transpose(1,2)
s0=s.clone()
with torch.inference_mode():
    print("mul_", b(lambda: s.mul_(1.0)), "mul_ fade", b(lambda: s.mul_(torch.ones(N,1,1))), "mul out", b(lambda: torch.mul(s,f)), )
    print("bmm", b(lambda: torch.bmm(k,s)), "baddbmm_", b(lambda: s.baddbmm_(kt,u,alpha=0.0)), "addcmul_", b(lambda: s.addcmul_(kt,u,value=0.0)), "mul kt u", b(lambda: kt*u))
    print("bmm2", b(lambda: torch.bmm(torch.cat([k,q],1),s)), "matmul 2rows", b(lambda: torch.bmm(s.transpose(1,2),kt)))
    s=s0.clone()
    x=s0.clone()
    a=x.clone().baddbmm_(kt,u); c=x+kt*u; d=x.clone().addcmul_(kt,u)
    print("baddbmm==mul+add", torch.equal(a,c), "addcmul==mul+add", torch.equal(d,c), "baddbmm==fma", torch.equal(a, (x.double()+kt.double()*u.double()).float()))
    print("addcmul==fma", torch.equal(d, (x.double()+kt.double()*u.double()).float()))
    print("empty", b(lambda: torch.empty(1)), "view", b(lambda: s.view(N,-1)), "unbind", b(lambda: s.unbind(0)), "index_select", b(lambda: s.index_select(0,torch.tensor([1]))))
    print("clone", b(lambda: s0.clone()), "copy_", b(lambda: s.copy_(s0)))

import json, os, resource, shutil, time, cProfile, pstats, io, threading
from pathlib import Path
from tests.benchmarks.training_load import state_of_shapes
def measure(rank, world, folder, gb, rounds, out):
    import torch.distributed as dist
    from ckptctl.distributed.saving import save
    import ckptctl.storage.executor as ex
    import ckptctl.distributed.collective_save as cs, ckptctl.distributed.saving as sv
    state = state_of_shapes(gb, world, "S0", 1.5); model={"model":state}
    T={}
    def wrap(obj,name,label=None):
        f=getattr(obj,name); label=label or name
        def g(*a,**k):
            s=time.perf_counter(); c=time.thread_time()
            try: return f(*a,**k)
            finally:
                t=T.setdefault(label,[0,0,0]); t[0]+=time.perf_counter()-s; t[1]+=1; t[2]+=time.thread_time()-c
        setattr(obj,name,g)
    C=cs.CollectiveSave
    for n in ("prepare","agree","planned","_write","_publish","_hold","_make_room","_again","_anew"): wrap(C,n)
    wrap(ex.Run,"create"); wrap(ex.Run,"fill"); wrap(ex.Run,"_work"); wrap(ex.Run,"result")
    wrap(cs,"held"); wrap(cs,"pack"); wrap(cs,"plan_key"); 
    wrap(ex.Worker,"do"); wrap(ex.Worker,"_put"); wrap(ex.Ledger,"commit")
    import ckptctl.storage.worker as wk
    wrap(wk,"crc32")
    import ckptctl.distributed.rank_output as ro
    wrap(ro,"host_views")
    from ckptctl.distributed.group import Group
    for n in ("all_gather","gather","scatter"): wrap(Group,n)
    for n in range(rounds+1):
        T.clear()
        p=Path(folder,"one"); dist.barrier(); s=time.perf_counter()
        save(model,p,sync=False,jobs=1); t=time.perf_counter()-s
        dist.barrier()
        if rank==0: shutil.rmtree(p)
        dist.barrier()
    if rank in (0,1):
        time.sleep(rank*.2)
        print("RANK",rank,"total",round(t,4))
        for k,v in T.items(): print(f"   {k:14} wall {v[0]*1e3:8.2f} ms  n {v[1]:5} cpu {v[2]*1e3:8.2f}")
    dist.barrier()
    raise SystemExit("done")

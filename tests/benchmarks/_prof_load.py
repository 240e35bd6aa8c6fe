import json, os, time, cProfile, pstats, io, sys
from pathlib import Path
from tests.benchmarks.training_load import state_of_shapes, _bare
from tests.benchmarks.training_save import _cpu
def measure(rank, world, folder, gb, words, out):
    import torch.distributed as dist
    from torch.distributed.checkpoint.state_dict_loader import load as stock
    from ckptctl.distributed.loading import load
    import ckptctl.distributed.loading as L, ckptctl.storage.executor as ex, ckptctl.storage.worker as wk
    state = state_of_shapes(gb, world, words, 0.5); model={"model":state}
    loc=[t.to_local() for t in state.values()]
    T={}
    def wrap(obj,name,label=None):
        f=getattr(obj,name); label=label or name
        def g(*a,**k):
            s=time.perf_counter(); c=time.thread_time()
            try: return f(*a,**k)
            finally:
                t=T.setdefault(label,[0,0,0]); t[0]+=time.perf_counter()-s; t[1]+=1; t[2]+=time.thread_time()-c
        setattr(obj,name,g)
    if out=="prof":
        for n in ("_planned","_filled","_read"): wrap(L._Load,n)
        for n in ("_plain","everything","map_state","compare","wanted_of","prepare","_give","_report","read_values","coordinator"): wrap(L,n)
        wrap(L.LoadOptions,"open"); wrap(L.Reading,"plan")
        wrap(ex.Run,"fill"); wrap(ex.Run,"_work"); wrap(ex.Worker,"do"); wrap(ex.Worker,"_into_memory"); wrap(ex.Worker,"_fill"); wrap(ex.Ledger,"commit")
        wrap(ex.Run,"result"); wrap(ex.Sources,"check"); 
        from ckptctl.distributed.group import Group
        for n in ("all_gather","gather","scatter","broadcast"): wrap(Group,n)
        for n in range(3):
            T.clear(); dist.barrier(); s=time.perf_counter(); load(model,folder,broadcast=False); t=time.perf_counter()-s; dist.barrier()
        if rank in (0,1):
            time.sleep(rank*.2)
            print("RANK",rank,"total",round(t,4))
            for k,v in T.items(): print(f"   {k:14} wall {v[0]*1e3:8.2f} ms  n {v[1]:5} cpu {v[2]*1e3:8.2f}")
        dist.barrier(); raise SystemExit("done")
    ways={"bare":lambda: _bare(folder,loc,rank),"bare1":lambda:_bare(folder,loc,rank,1),
      "j0":lambda: load(model,folder,broadcast=False),"j2":lambda: load(model,folder,broadcast=False,jobs=2),
      "auto":lambda: load(model,folder), "dcp":lambda: stock(model,checkpoint_id=folder)}
    names=list(ways); found={}
    for n in range(9):
        for name in names[n%len(names):]+names[:n%len(names)]:
            for t in loc: t.fill_(.25)
            dist.barrier(); b,s=_cpu(),time.perf_counter()
            ways[name](); dist.barrier(); w=time.perf_counter()-s
            sp=[None]*world; dist.all_gather_object(sp,_cpu()-b)
            if n: found.setdefault(name,[]).append((w,sum(sp)))
    if rank==0: Path(out).write_text(json.dumps(found))

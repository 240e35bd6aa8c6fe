import json, os, resource, shutil, time
from pathlib import Path
from tests.benchmarks.training_load import state_of_shapes
from tests.benchmarks.training_save import bare, _cpu
def measure(rank, world, folder, gb, rounds, out):
    import torch.distributed as dist
    from isal.isal_zlib import crc32
    from ckptctl.distributed.saving import save
    from ckptctl.distributed.state import memory
    state = state_of_shapes(gb, world, "S0", 1.5); model={"model":state}
    views=[memory(t.to_local()) for t in state.values()]
    ways={"bare":lambda p: bare(p,views,rank,crc32,sync=False),
     "j0":lambda p: save(model,p,sync=False),
     "j1":lambda p: save(model,p,sync=False,jobs=1),
     "j2":lambda p: save(model,p,sync=False,jobs=2),
     "j2f2":lambda p: save(model,p,sync=False,jobs=2,files=2),
     "j1sync":lambda p: save(model,p,sync=True,jobs=1),
     }
    names=list(ways); found={}
    for n in range(rounds+1):
        order=names[n%len(names):]+names[:n%len(names)]
        for name in order:
            p=Path(folder,"one"); dist.barrier(); b,s=_cpu(),time.perf_counter()
            ways[name](p); dist.barrier(); w=time.perf_counter()-s
            sp=[None]*world; dist.all_gather_object(sp,_cpu()-b)
            if rank==0: shutil.rmtree(p)
            dist.barrier()
            if n: found.setdefault(name,[]).append((w,sum(sp)))
    if rank==0:
        Path(out).write_text(json.dumps({"samples":found,"nbytes":sum(t.numel()*2 for t in state.values())}))

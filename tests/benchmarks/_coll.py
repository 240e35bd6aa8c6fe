import time
from tests.benchmarks.training_save import _cpu
def measure(rank, world, n):
    import torch, torch.distributed as dist, socket, os
    from ckptctl.distributed.group import Group
    g=Group()
    def t(label,f,n=n):
        f(); dist.barrier(); c,s=_cpu(),time.perf_counter()
        for _ in range(n): f()
        w=time.perf_counter()-s; c=_cpu()-c; dist.barrier()
        if rank==0: print(f"{world} {label:20} wall {w/n*1e3:.3f} ms cpu {c/n*1e3:.3f} ms",flush=True)
    t("all_gather None",lambda:g.all_gather(None))
    t("all_gather 1k",lambda:g.all_gather(b"x"*1000))
    t("gather",lambda:g.gather(None)); t("scatter",lambda:g.scatter([None]*world if rank==0 else None)); t("bcast",lambda:g.broadcast(1))
    x=torch.zeros(4096,dtype=torch.uint8); o=torch.zeros(4096*world,dtype=torch.uint8)
    t("tensor ag 4k",lambda:dist.all_gather_into_tensor(o,x))
    t("barrier",dist.barrier)
    t("hostname",socket.gethostname)
    f=os.open("/dev/shm/_x8",os.O_RDWR|os.O_CREAT); os.ftruncate(f,8<<20); os.pwrite(f,bytes(8<<20),0)
    t("pread8",lambda:os.pread(f,8<<20,0),20); t("pread1",lambda:os.pread(f,1<<20,0),20)
    if rank==0: os.unlink("/dev/shm/_x8")

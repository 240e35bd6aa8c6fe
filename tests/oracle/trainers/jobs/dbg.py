from pathlib import Path
import torch, torch.distributed as dist
from torch.distributed.checkpoint.state_dict import *
from tests.oracle.trainers.jobs.lightning_saves import *
from tests.oracle.trainers.jobs.lightning_saves import _sharded
from tests.checkpoints.readers import differences
def go(rank, world, folder):
    announce(rank, world)
    torch.manual_seed(0)
    fabric = lightning.Fabric(accelerator="cpu", devices=world, strategy=FabricParallel(_sharded))
    fabric.launch()
    raw=Model(tied=True, frozen=True)
    model = fabric.setup(raw)
    print("ORIG", model._forward_module is raw, flush=True)
    opt = fabric.setup_optimizers(torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2))
    for step in range(2):
        fabric.backward(model(tokens(rank, step)))
        opt.step(); opt.zero_grad()
    a=full(model.state_dict())
    b=full(get_model_state_dict(model._forward_module))
    c=full(get_model_state_dict(model._forward_module, options=StateDictOptions(cpu_offload=True)))
    loc={k:(v.to_local() if hasattr(v,"to_local") else v).clone() for k,v in model.state_dict().items()}
    loc2={k:(v.to_local() if hasattr(v,"to_local") else v).clone() for k,v in get_model_state_dict(model._forward_module, options=StateDictOptions(cpu_offload=True)).items()}
    print("DBG",rank,"a-b",differences(b,a),"a-c",differences(c,a),"local",differences(loc2,loc),flush=True)
    a2=full(model.state_dict())
    print("DBG",rank,"again",differences(a2,a),flush=True)
    sds=[v for v in model.state_dict().values() if hasattr(v,"to_local")]
    print("DBG",rank,[ (k,v.to_local().shape,v._spec.tensor_meta.stride, v.to_local().is_contiguous()) for k,v in model.state_dict().items() if k in("emb.weight","down.bias","head.weight")],flush=True)
    dist.barrier()
    raise SystemExit(1)

import itertools, sys, time, tempfile
from pathlib import Path
import torch, torch.distributed as dist
from tests.ranks import run_ranks, tiny_overrides
from trainer import Trainer, load_config
from trainer.optim.muon import Muon
from trainer.optim.optimizer import Optimizer, build_optimizer
KW = {}
class T(Trainer):
    def build_optimizer(self):
        hidden = [(n,p) for n,p in self.model.named_parameters() if p.ndim>=2 and not any(w in n for w in ("embed","head","wte","wpe","router","gate."))]
        ids={id(p) for _,p in hidden}
        rest=[p for p in self.model.parameters() if id(p) not in ids]
        o=self.config.optim
        return Optimizer(Muon([p for _,p in hidden], lr=o.lr, **KW), torch.optim.AdamW(rest, lr=o.lr, fused=True))
def train(folder, kw, overrides, model):
    KW.clear(); KW.update(kw)
    own=["data.source=stdlib","data.seq_len=48","train.steps=20","train.global_batch_size=12","train.micro_batch_size=1","schedule.warmup_steps=2","optim.lr=0.01","run.threads=1","eval.every=0","checkpoint.every=0","log.every=1","log.sample_tokens=0"]
    t=T(load_config(model, [*own,*overrides,f"run.dir={folder}"]))
    losses=[]; cpu=0
    step=t.optimizer.parts[0].step
    for r in t.steps():
        losses.append(r.loss)
    t.optimizer.parts[0]  
    c=time.process_time(); 
    for p in t.optimizer.parts[0].param_groups[0]["params"]: p.grad=torch.ones_like(p)
    for _ in range(3): t.optimizer.parts[0].step()
    cpu=(time.process_time()-c)/3*1e3
    t.close()
    return losses,cpu
LL=["model.vocab_size=257","model.dim=56","model.num_layers=2","model.num_heads=4","model.num_kv_heads=2","model.ffn_dim=90"]
MOE=["model.vocab_size=257","model.dim=32","model.num_layers=2","model.num_heads=4","model.num_kv_heads=2"]
def main():
    d=Path(tempfile.mkdtemp())
    cases=[("1",1,[]),("2",2,["mesh.shard=2"]),("3",3,["mesh.shard=3"]),("4",4,["mesh.shard=4"]),("2x2",4,["mesh.shard=2","mesh.replicate=2"]),("r2",2,["mesh.shard=1","mesh.replicate=2"]),("ctx",2,["mesh.shard=2","mesh.context=2"])]
    for model,ov in (("qwen3_moe_small",MOE),):
      for name,kw in (("muon f32",dict(dtype=torch.float32)),("normuon f32",dict(dtype=torch.float32,variant="normuon")),("muon bf16",{}),("muon f32 small buckets cautious",dict(dtype=torch.float32,bucket_bytes=60000,cautious=True)),("polar",dict(coefficients="polar"))):
        base=None
        for label,n,o in cases:
            if model!="llama_small" and label=="ctx": continue
            found=run_ranks(n,train,d/f"{model}{name}{label}".replace(" ","_"),kw,[*ov,*o],model)
            losses=found[0][0]; cpu=max(f[1] for f in found)
            base=base or losses
            print(model,name,label,f"{max(abs(a-b)/b for a,b in zip(losses,base)):.2e}",f"last {losses[-1]:.4f} cpu {cpu:.1f} ms",flush=True)
if __name__=="__main__": main()

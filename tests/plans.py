"""One table of plans, for every test that compares plans: eight devices, `decoder-tiny`, batch 16."""

QUICK = (
    "fsdp=8,compute=f32",
    "data=2,fsdp=2,tensor=2,sequence=tensor,remat=block,compute=f32,accumulate=2,loss_chunks=4",
)
LONG = (
    "data=8,zero=0,compute=f32",
    "data=8,zero=1,compute=f32",
    "data=4,fsdp=2,zero=2,compute=f32",
    "fsdp=8,zero=1,compute=f32,remat=attention",
    "fsdp=8,remat=dots,compute=f32",
    "fsdp=8,remat=save:query_proj+out_proj,compute=f32",
    "fsdp=4,tensor=2,layers=unroll,compute=f32",
    "tensor=4,data=2,compute=f32",
    "data=2,tensor=4,sequence=tensor,compute=f32",  # more shards than kv heads
    "fsdp=8,accumulate=2,compute=f32",
)
EVERY = (*QUICK, *LONG)

"""Model-parallel shards and device meshes: what each rank holds of a tensor."""

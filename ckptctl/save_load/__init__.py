"""Planning of saves and loads in training, without torch.

`ckptctl.distributed` executes the plans.
"""

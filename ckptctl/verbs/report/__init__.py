"""Page about a checkpoint: its contents, files, findings and differences from another one."""

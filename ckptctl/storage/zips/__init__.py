"""The zips that torch.save writes, whole files and write items alike."""

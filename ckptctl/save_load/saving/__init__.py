"""Planning of saves that write the shards of all ranks to one DCP directory."""

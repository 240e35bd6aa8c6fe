"""Safe unpickling of non-tensor values, by constructors with checked arguments."""

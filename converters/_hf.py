"""Tables of embeddings, final norm and output for most models in transformers."""

BEFORE = """
logical  axes  hf
embed    v d   model.embed_tokens.weight
"""

AFTER = """
logical  axes  hf
norm     d     model.norm.weight
output   v d   lm_head.weight
"""

AFTER_LAYER_NORM = """
logical    axes  hf
norm       d     model.norm.weight
norm_bias  d     model.norm.bias
output     v d   lm_head.weight
"""

BEFORE_V5 = """
logical  axes  hf, hf-v5
embed    v d   model.embed_tokens.weight
"""

AFTER_V5 = """
logical  axes  hf, hf-v5
norm     d     model.norm.weight
output   v d   lm_head.weight
"""

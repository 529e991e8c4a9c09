"""Optional adapters to frameworks, one module each, above `fmha_gen.runtime`. Importing this package imports none.

`fmha_gen.interop.torch`: a PyTorch operator, `flash_attn_func` and `scaled_dot_product_attention`.
"""

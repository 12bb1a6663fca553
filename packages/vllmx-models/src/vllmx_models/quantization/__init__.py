"""Quantisation schemes of safetensors checkpoints, one file each, named by `quant_method`.

A scheme turns the dense source of a format into a source of `StoredPart`s. Their buffers are the
file's tensors; their layout, a subclass of `vllmx_core.weights.part.Layout`, reads them.

| kind | buffers | options |
| --- | --- | --- |
| gptq | qweight, qzeros, scales, g_idx | zero_offset, symmetric, act_order |
| awq | qweight, qzeros, scales | packing: gemm or gemv |
| pack_int | weight, scale, zero_point, g_idx | symmetric, act_order |
| int8 | weight, scale, zero_point | strategy, symmetric |
| fp8 | weight, scale | strategy: tensor, channel or block; block_rows, block_cols; dtype |
| fp4 | weight, scale, global_scale | scale: its dtype; global_scale: none, multiply or divide |

Static activation scales are in `input_scale`. The options `activations` (none, static or dynamic),
`activation_bits` and `activation_strategy` describe the activations that the checkpoint expects.
"""

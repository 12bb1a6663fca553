"""Quantisation schemes of safetensors checkpoints, one file each, named by `quant_method`.

A scheme turns the dense source of a format into one whose parts carry a `QuantLayout`: the buffers
are the file's tensors as they are, the layout says how to read them, `decode` gives float32.

| kind | buffers | options |
| --- | --- | --- |
| gptq | qweight, qzeros, scales, g_idx | zero_offset, symmetric, act_order |
| awq | qweight, qzeros, scales | packing: gemm or gemv |
| pack_int | weight, scale, zero_point, g_idx | symmetric, act_order |
| int8 | weight, scale, zero_point | strategy, symmetric |
| fp8 | weight, scale | strategy: tensor, channel or block; block_rows, block_cols; dtype |
| fp4 | weight, scale, global_scale | global_scale: none, multiply or divide |

`input_scale` is there where activations have a static one; the options `activations` (none, static
or dynamic), `activation_bits` and `activation_strategy` say how the checkpoint wants them.
"""

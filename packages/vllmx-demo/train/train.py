"""Train the demo model: a small Qwen3-layout transformer on packed rows, Muon for the matrices and AdamW for the rest."""

import argparse
import functools
import glob
import json
import math
import os
import time

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn

LONG = 4  # rows joined to one of 2048 in long steps


class RMSNorm(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), 1e-6)


linear = functools.partial(nn.Linear, bias=False)


def rotate(x, rope):
    (cos, sin), (lo, hi) = rope, x.chunk(2, -1)
    return torch.cat((lo * cos - hi * sin, hi * cos + lo * sin), -1)


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        h, self.hd = c["hidden_size"], c["head_dim"]
        q, kv = (c[f"num_{k}_heads"] * self.hd for k in ("attention", "key_value"))
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            linear(h, q),
            linear(h, kv),
            linear(h, kv),
            linear(q, h),
        )
        self.q_norm, self.k_norm = RMSNorm(self.hd), RMSNorm(self.hd)

    def forward(self, x, rope, mask):
        b, t, _ = x.shape
        q, k, v = (p(x).view(b, t, -1, self.hd) for p in (self.q_proj, self.k_proj, self.v_proj))
        q, k = (rotate(n(y).transpose(1, 2), rope) for n, y in ((self.q_norm, q), (self.k_norm, k)))
        n = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(n, 1), v.transpose(1, 2).repeat_interleave(n, 1)
        if mask is None:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:  # plain products, the causal half in blocks: faster than the fused kernel on small CPUs
            q, cut, s = q * self.hd**-0.5, [], t // 4
            for i in range(0, t, s):
                score = (
                    q[:, :, i : i + s] @ k[:, :, : i + s].transpose(-1, -2)
                    + mask[:, :, i : i + s, : i + s]
                )
                cut.append(score.softmax(-1) @ v[:, :, : i + s])
            y = torch.cat(cut, 2)
        return self.o_proj(y.transpose(1, 2).reshape(b, t, -1))


class Mlp(nn.Module):
    def __init__(self, h, m):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = linear(h, m), linear(h, m), linear(m, h)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, c):
        super().__init__()
        h = c["hidden_size"]
        self.self_attn, self.mlp = Attention(c), Mlp(h, c["intermediate_size"])
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(h), RMSNorm(h)

    def forward(self, x, rope, mask):
        x = x + self.self_attn(self.input_layernorm(x), rope, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Model(nn.Module):
    "Parameter names follow Qwen3ForCausalLM (with the prefix model. when saved)."

    def __init__(self, c):
        super().__init__()
        h, n = c["hidden_size"], c["num_hidden_layers"]
        self.embed_tokens, self.norm = nn.Embedding(c["vocab_size"], h), RMSNorm(h)
        self.layers = nn.ModuleList(Layer(c) for _ in range(n))
        freq = c["rope_theta"] ** (-torch.arange(0, c["head_dim"], 2) / c["head_dim"])
        angle = torch.arange(c["max_position_embeddings"])[:, None] * freq
        self.register_buffer("cos", angle.cos().bfloat16(), persistent=False)
        self.register_buffer("sin", angle.sin().bfloat16(), persistent=False)
        for name, p in self.named_parameters():
            if p.ndim == 2:
                scale = (
                    0.5
                    / math.sqrt(p.shape[1])
                    / (math.sqrt(2 * n) if "o_proj" in name or "down" in name else 1)
                )
                nn.init.normal_(p, std=0.02 if "embed" in name else scale)

    def forward(self, ids, mask, keep):
        "Logits at the kept places only."
        t = ids.shape[1]
        rope, x = (self.cos[:t], self.sin[:t]), self.embed_tokens(ids).bfloat16()
        for layer in self.layers:
            x = layer(x, rope, mask)
        return F.linear(self.norm(x.flatten(0, 1)[keep]), self.embed_tokens.weight)


def batches(folder, rows, rng):
    "Endless batches of whole groups; now and then a long one: rows joined, documents not kept apart."
    while True:
        for name in sorted(glob.glob(folder + "/*.npz")):
            z = np.load(name)
            parts = [z[k].reshape(-1, LONG, z[k].shape[1]) for k in ("ids", "learn", "doc")]
            order = rng.permutation(len(parts[0]))
            for i in range(0, len(order) - rows // LONG + 1, rows // LONG):
                long, g = rng.random() < 0.08, order[i : i + rows // LONG]
                shape = (-1, (LONG if long else 1) * parts[0].shape[2])
                yield long, *(torch.from_numpy(v[g].astype(np.int64)).reshape(shape) for v in parts)


def step_loss(model, long, ids, learn, doc):
    keep, mask = learn[:, 1:].bool(), None
    if not long:
        keep &= doc[:, 1:] == doc[:, :-1]
        see = (doc[:, None, :] == doc[:, :, None]) & torch.ones(
            ids.shape[1], ids.shape[1], dtype=torch.bool
        ).tril()
        mask = torch.zeros(see.shape, dtype=torch.bfloat16).masked_fill(~see, float("-inf"))[
            :, None
        ]
    keep = F.pad(keep, (0, 1))
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(ids, mask, keep.flatten())
    return F.cross_entropy(logits.float(), F.pad(ids[:, 1:], (0, 1))[keep])


def save(model, cfg, out, average=None):
    os.makedirs(out, exist_ok=True)
    state = average or dict(model.named_parameters())
    save_file(
        {"model." + k: v.detach().bfloat16().contiguous() for k, v in state.items()},
        out + "/model.tmp",
        {"format": "pt"},
    )
    os.replace(out + "/model.tmp", out + "/model.safetensors")
    gen = dict(
        eos_token_id=[2, 0], pad_token_id=0, do_sample=True, temperature=0.7, top_p=0.9, top_k=40
    )
    for name, what in (("config", cfg), ("generation_config", gen)):
        with open(f"{out}/{name}.json", "w") as f:
            json.dump(what, f, indent=1)


def main():
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--data", required=True, help="folder with the packed shards")
    p.add_argument("--out", required=True, help="model folder")
    p.add_argument("--minutes", type=float, default=48, help="the schedule goes by the clock")
    p.add_argument("--steps", type=int, help="the schedule goes by steps instead")
    p.add_argument("--init", help="go on from the weights in this folder")
    p.add_argument("--rows", type=int, default=16)
    p.add_argument("--lr", type=float, default=0.012, help="of Muon; AdamW takes a quarter")
    p.add_argument("--compile", action="store_true", help="needs a C++ compiler, 1.4 times as fast")
    args = p.parse_args()
    cfg = dict(
        architectures=["Qwen3ForCausalLM"],
        model_type="qwen3",
        vocab_size=4096,
        hidden_size=256,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        intermediate_size=768,
        hidden_act="silu",
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        attention_bias=False,
        attention_dropout=0.0,
        use_sliding_window=False,
        initializer_range=0.02,
        eos_token_id=2,
        pad_token_id=0,
        torch_dtype="bfloat16",
        use_cache=True,
    )
    torch.manual_seed(0)
    model = Model(cfg)
    if args.init:
        model.load_state_dict(
            {k[6:]: v.float() for k, v in load_file(args.init + "/model.safetensors").items()}
        )
    print("parameters", sum(x.numel() for x in model.parameters()), flush=True)
    small = [x for n, x in model.named_parameters() if x.ndim == 1 or "embed" in n]
    mats = [x for n, x in model.named_parameters() if x.ndim == 2 and "embed" not in n]
    opts = [
        torch.optim.Muon(mats, lr=args.lr, weight_decay=0.02, adjust_lr_fn="original"),
        torch.optim.AdamW(small, lr=args.lr / 4, betas=(0.9, 0.98), weight_decay=0),
    ]
    for layer in model.layers if args.compile else ():
        layer.compile(dynamic=False)
    average, seen, learned, log, start = None, 0, 0, [], time.time()
    saved = start
    for step, batch in enumerate(batches(args.data, args.rows, np.random.default_rng(0))):
        done = step / args.steps if args.steps else (time.time() - start) / 60 / args.minutes
        if done >= 1:
            break
        rate = min(1, (step + 1) / 100) * (
            0.02 + 0.49 * (1 + math.cos(math.pi * done))
        )  # warm-up, cosine
        for o, lr in zip(opts, (args.lr, args.lr / 4)):
            o.param_groups[0]["lr"] = lr * rate
        loss = step_loss(model, *batch)
        loss.backward()
        nn.utils.clip_grad_norm_(small, 1.0)
        for o in opts:
            o.step()
            o.zero_grad()
        seen, learned, log = (
            seen + batch[1].numel(),
            learned + int(batch[2].sum()),
            log[-24:] + [loss.item()],
        )
        if done > 0.9 and step % 5 == 0:  # average over the end of the run
            average = average or {n: x.detach().clone() for n, x in model.named_parameters()}
            for n, x in model.named_parameters():
                average[n].lerp_(x.detach(), 0.05)
        if step % 25 == 0:
            print(
                f"step {step} done {done:.3f} loss {np.mean(log):.4f} tokens {seen} learned {learned} "
                f"per second {seen / (time.time() - start):.0f}",
                flush=True,
            )
        if time.time() - saved > 240:
            save(model, cfg, args.out)
            saved = time.time()
    save(model, cfg, args.out, average)
    print(
        f"end: steps {step} tokens {seen} learned {learned} minutes {(time.time() - start) / 60:.1f}",
        flush=True,
    )


if __name__ == "__main__":
    main()

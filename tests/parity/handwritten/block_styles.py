"""Cases of decoders with special blocks: norms, gates, caps, sinks, windows, shared caches, experts."""

from __future__ import annotations

import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from support.handwritten_case import BLOCK, VOCABULARY, Case

D, H, HD = 24, 3, 8


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-6, plus_one=False):
        super().__init__()
        self.eps, self.plus_one = eps, plus_one
        self.weight = nn.Parameter(torch.zeros(dim) if plus_one else torch.ones(dim))

    def forward(self, x):
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return x * (1 + self.weight) if self.plus_one else self.weight * x


class ScaleNorm(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.g = nn.Parameter(torch.ones(1) * dim**0.5)

    def forward(self, x):
        return x / torch.norm(x, dim=-1, keepdim=True).clamp(min=1e-5) * self.g


class AnnotatedNorm(nn.Module):
    """The Annotated Transformer's: std with Bessel's correction, eps outside of the root."""

    def __init__(self, features, eps=1e-6):
        super().__init__()
        self.a_2, self.b_2, self.eps = nn.Parameter(torch.ones(features)), nn.Parameter(torch.zeros(features)), eps

    def forward(self, x):
        mean = x.mean(-1, keepdim=True)
        std = x.std(-1, keepdim=True)
        return self.a_2 * (x - mean) / (std + self.eps) + self.b_2


class SwiGLU(nn.Module):
    def __init__(self):
        super().__init__()
        self.w12, self.w3 = nn.Linear(D, 2 * 40, bias=False), nn.Linear(40, D, bias=False)

    def forward(self, x):
        gate, up = self.w12(x).chunk(2, -1)
        return self.w3(F.silu(gate) * up)


class MLP(nn.Module):
    def __init__(self, act=F.gelu):
        super().__init__()
        self.fc, self.proj, self.act = nn.Linear(D, 64), nn.Linear(64, D), act

    def forward(self, x):
        return self.proj(self.act(self.fc(x)))


class Attention(nn.Module):
    """Four projections, and `scores` to be changed by a subclass before the softmax."""

    def __init__(self, head=HD, value=None):
        super().__init__()
        self.head, self.value = head, value or head
        self.q, self.k = nn.Linear(D, H * head), nn.Linear(D, H * head)
        self.v, self.o = nn.Linear(D, H * self.value), nn.Linear(H * self.value, D)

    def split(self, x, size):
        return x.view(*x.shape[:2], H, size).transpose(1, 2)

    def scores(self, q, k):
        return q @ k.transpose(-2, -1) / math.sqrt(self.head)

    def weights(self, scores):
        T = scores.shape[-1]
        return F.softmax(scores + torch.triu(torch.full((T, T), float("-inf")), diagonal=1), dim=-1)

    def forward(self, x):
        q, k, v = self.split(self.q(x), self.head), self.split(self.k(x), self.head), self.split(self.v(x), self.value)
        y = self.weights(self.scores(q, k)) @ v
        return self.o(y.transpose(1, 2).reshape(*x.shape[:2], -1))


class SoftCapped(Attention):
    """Soft caps of scores before the mask, as in Gemma 2 and Grok."""

    def scores(self, q, k):
        return 5.0 * torch.tanh(super().scores(q, k) / 5.0)


class QKNorm(Attention):
    """Cosine attention with a learned scale per head."""

    def __init__(self):
        super().__init__()
        self.logit_scale = nn.Parameter(torch.log(10 * torch.ones(H, 1, 1)))

    def scores(self, q, k):
        attn = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1)
        return attn * torch.clamp(self.logit_scale, max=math.log(100.0)).exp()


class Sink(Attention):
    """A learned logit per head, concatenated to the scores before the softmax and dropped after it (gpt-oss)."""

    def __init__(self):
        super().__init__()
        self.sinks = nn.Parameter(torch.randn(H))

    def weights(self, scores):
        B, _, T, _ = scores.shape
        scores = scores + torch.triu(scores.new_full((T, T), -float("inf")), diagonal=1)
        S = self.sinks.reshape(1, H, 1, 1).expand(B, -1, T, -1)
        return torch.softmax(torch.cat([scores, S], dim=-1), dim=-1)[..., :-1]


class SoftmaxOne(Attention):
    """exp over one plus the sum."""

    def weights(self, scores):
        T = scores.shape[-1]
        scores = scores.masked_fill(torch.ones(T, T).tril() == 0, float("-inf"))
        top = scores.max(dim=-1, keepdim=True).values.clamp(min=0)
        e = torch.exp(scores - top)
        return e / (torch.exp(-top) + e.sum(dim=-1, keepdim=True))


class NullKeyValue(Attention):
    """A learned key and value in front of all, always visible; the mask padded by a column for it."""

    def __init__(self):
        super().__init__()
        self.null_kv = nn.Parameter(torch.randn(2, H, 1, HD))

    def forward(self, x):
        b, n, _ = x.shape
        q, k, v = (self.split(f(x), HD) for f in (self.q, self.k, self.v))
        nk, nv = (t.unsqueeze(0).expand(b, -1, -1, -1) for t in self.null_kv)
        k, v = torch.cat((nk, k), dim=-2), torch.cat((nv, v), dim=-2)
        sim = q @ k.transpose(-1, -2) * HD**-0.5
        i, j = sim.shape[-2:]
        causal_mask = torch.ones((i, j), dtype=torch.bool).triu(j - i + 1)
        sim = sim.masked_fill(causal_mask, -torch.finfo(sim.dtype).max)
        y = sim.softmax(dim=-1) @ v
        return self.o(y.transpose(1, 2).reshape(b, n, -1))


class NullAtTheEnd(NullKeyValue):
    """The same at the end, as add_bias_kv has it; its column of the mask is zero."""

    def forward(self, x):
        b, n, _ = x.shape
        q, k, v = (self.split(f(x), HD) for f in (self.q, self.k, self.v))
        k = torch.cat([k, self.null_kv[0].repeat(b, 1, 1, 1)], dim=2)
        v = torch.cat([v, self.null_kv[1].repeat(b, 1, 1, 1)], dim=2)
        mask = F.pad(torch.triu(torch.full((n, n), float("-inf")), 1), (0, 1))
        y = torch.softmax(q @ k.mT * HD**-0.5 + mask, -1) @ v
        return self.o(y.transpose(1, 2).reshape(b, n, -1))


class SlidingWindow(Attention):
    """Itself and three before it, by comparing positions."""

    def weights(self, scores):
        T = scores.size(-1)
        distance = torch.arange(T)[:, None] - torch.arange(T)
        visible = (distance >= 0) & (distance < 4)
        return scores.masked_fill(~visible, torch.finfo(scores.dtype).min).softmax(-1)


class Strided(Attention):
    """Every third position and the own block: Sparse Transformer's fixed pattern."""

    def weights(self, scores):
        T = scores.size(-1)
        i, j = torch.arange(T).unsqueeze(1), torch.arange(T).unsqueeze(0)
        keep = (j <= i) & ((i // 3 == j // 3) | (j % 3 == 2))
        return torch.where(keep, scores, float("-inf")).softmax(-1)


class TalkingHeads(Attention):
    """Heads mixed before and after the softmax."""

    def __init__(self):
        super().__init__()
        self.before, self.after = nn.Conv2d(H, H, 1, bias=False), nn.Linear(H, H, bias=False)

    def weights(self, scores):
        scores = self.before(scores)
        T = scores.shape[-1]
        w = scores.masked_fill(torch.ones(T, T).tril() == 0, -1e9).softmax(-1)
        return self.after(w.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Sigmoid(Attention):
    """Sigmoid attention: no normalisation at all, squared ReLU's cousin."""

    def weights(self, scores):
        T = scores.shape[-1]
        return torch.sigmoid(scores - 1.5).masked_fill(torch.triu(torch.ones(T, T), 1).bool(), 0.0)


class Differential(nn.Module):
    """Two softmaxes, the second subtracted with a learned factor; a norm by head after."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (
            nn.Linear(D, 2 * H * 4),
            nn.Linear(D, 2 * H * 4),
            nn.Linear(D, H * 8),
            nn.Linear(H * 8, D),
        )
        self.lq, self.lk = nn.Parameter(torch.randn(4) * 0.1), nn.Parameter(torch.randn(4) * 0.1)
        self.norm = RMSNorm(8)

    def forward(self, x):
        b, t, _ = x.size()
        q, k = (f(x).view(b, t, 2 * H, 4).transpose(1, 2) for f in (self.q, self.k))
        v = self.v(x).view(b, t, H, 8).transpose(1, 2)
        w = torch.matmul(q * 4**-0.5, k.transpose(-1, -2))
        w += torch.triu(torch.zeros([t, t]).float().fill_(float("-inf")), 1)
        w = F.softmax(w, dim=-1, dtype=torch.float32).view(b, H, 2, t, t)
        w = w[:, :, 0] - (torch.exp(torch.sum(self.lq * self.lk)) + 0.2) * w[:, :, 1]
        return self.o((self.norm(torch.matmul(w, v)) * 0.8).transpose(1, 2).reshape(b, t, -1))


class MultiLatent(nn.Module):
    """DeepSeek's: keys and values from a narrow latent, a rotary part that all heads share, values of another size."""

    def __init__(self):
        super().__init__()
        self.down, self.up, self.kr = nn.Linear(D, 10), nn.Linear(10, H * (6 + 5)), nn.Linear(D, 4)
        self.q, self.o, self.norm = nn.Linear(D, H * 10), nn.Linear(H * 5, D), RMSNorm(10)
        angle = torch.outer(torch.arange(BLOCK).float(), torch.tensor([1.0, 0.1])).repeat(1, 2)
        self.register_buffer("cos", angle.cos())
        self.register_buffer("sin", angle.sin())

    def rotate(self, x, t):
        half = torch.cat((-x[..., 2:], x[..., :2]), -1)
        return x * self.cos[:t] + half * self.sin[:t]

    def forward(self, x):
        b, t, _ = x.shape
        q = self.q(x).view(b, t, H, 10).transpose(1, 2)
        q_nope, q_rope = torch.split(q, [6, 4], dim=-1)
        kv = self.up(self.norm(self.down(x))).view(b, t, H, 11).transpose(1, 2)
        k_nope, v = torch.split(kv, [6, 5], dim=-1)
        k_rope = self.rotate(self.kr(x).view(b, t, 1, 4).transpose(1, 2), t).expand(-1, H, -1, -1)
        q, k = torch.cat([q_nope, self.rotate(q_rope, t)], -1), torch.cat([k_nope, k_rope], -1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).reshape(b, t, -1))


class Retention(nn.Module):
    """RetNet's parallel form: a decay matrix in place of the softmax."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.g, self.o = (nn.Linear(D, D) for _ in range(5))
        self.register_buffer("decay", torch.log(1 - 2 ** (-1 - torch.arange(H, dtype=torch.float))))
        self.group_norm = nn.LayerNorm(HD, elementwise_affine=False)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = (f(x).view(b, t, H, HD).transpose(1, 2) for f in (self.q, self.k, self.v))
        index = torch.arange(t).to(self.decay)
        mask = torch.tril(torch.ones(t, t))
        exponent = torch.masked_fill(index[:, None] - index[None, :], ~mask.bool(), torch.inf)
        mask = torch.nan_to_num(torch.exp(exponent * self.decay[:, None, None]))
        out = self.group_norm((q @ k.transpose(-1, -2) * HD**-0.5 * mask) @ v)
        return self.o(F.silu(self.g(x)) * out.transpose(1, 2).reshape(b, t, -1))


# -- around the attention --------------------------------------------------------------------------------------------


class LM(nn.Module):
    """`block` is called with x; norms before, a cap on the logits if wanted, output tied to the embedding."""

    def __init__(self, block, layers=1, cap=None, norm=nn.LayerNorm):
        super().__init__()
        self.emb, self.pos = nn.Embedding(VOCABULARY, D), nn.Parameter(torch.randn(1, BLOCK, D) * 0.5)
        self.blocks = nn.ModuleList([block() for _ in range(layers)])
        self.norm, self.cap = norm(D), cap

    def forward(self, idx):
        x = self.emb(idx) * D**0.5 + self.pos[:, : idx.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.emb.weight)
        return logits if self.cap is None else torch.tanh(logits / self.cap) * self.cap


class PreNorm(nn.Module):
    def __init__(self, attention, ff=MLP, norm=nn.LayerNorm):
        super().__init__()
        self.attention, self.ff, self.n1, self.n2 = attention(), ff(), norm(D), norm(D)

    def forward(self, x):
        x = x + self.attention(self.n1(x))
        return x + self.ff(self.n2(x))


class Parallel(PreNorm):
    """GPT-J's: both sublayers read the same norm."""

    def forward(self, x):
        h = self.n1(x)
        return x + self.attention(h) + self.ff(h)


class SandwichNorm(nn.Module):
    """A norm before and after each sublayer, Gemma 2's, with weights that start at zero and are added to one."""

    def __init__(self, attention, ff=SwiGLU):
        super().__init__()
        self.attention, self.ff = attention(), ff()
        self.norms = nn.ModuleList([RMSNorm(D, plus_one=True) for _ in range(4)])

    def forward(self, x):
        x = x + self.norms[1](self.attention(self.norms[0](x)))
        return x + self.norms[3](self.ff(self.norms[2](x)))


class ReZero(PreNorm):
    """Gates instead of norms, one learned number each."""

    def __init__(self, attention):
        super().__init__(attention)
        self.resweight = nn.Parameter(torch.Tensor([0.4]))

    def forward(self, x):
        x = x + self.attention(x) * self.resweight
        return x + self.ff(x) * self.resweight


class SharedKeysAndValues(nn.Module):
    """The second half of the layers reads the first half's keys and values (YOCO, cross-layer attention)."""

    def __init__(self):
        super().__init__()
        self.emb, self.pos = nn.Embedding(VOCABULARY, D), nn.Embedding(BLOCK, D)
        self.k, self.v = nn.Linear(D, D), nn.Linear(D, D)
        self.layers = nn.ModuleList(
            nn.ModuleDict({"q": nn.Linear(D, D), "o": nn.Linear(D, D), "ff": MLP(), "n1": RMSNorm(D), "n2": RMSNorm(D)})
            for _ in range(3)
        )
        self.out = nn.Linear(D, VOCABULARY)

    def forward(self, idx):
        b, t = idx.shape
        x = self.emb(idx) + self.pos(torch.arange(t))
        kv = None
        for layer in self.layers:
            h = layer["n1"](x)
            if kv is None:
                kv = [f(h).view(b, t, H, HD).transpose(1, 2) for f in (self.k, self.v)]
            q = layer["q"](h).view(b, t, H, HD).transpose(1, 2)
            y = F.scaled_dot_product_attention(q, kv[0], kv[1], is_causal=True)
            x = x + layer["o"](y.transpose(1, 2).flatten(-2))
            x = x + layer["ff"](layer["n2"](x))
        return self.out(x)


class Universal(nn.Module):
    """One layer used three times, with a step embedding (Universal Transformer without halting)."""

    def __init__(self):
        super().__init__()
        self.layer, self.steps = PreNorm(Attention), nn.Embedding(3, D)
        self.emb, self.pos, self.out = nn.Embedding(VOCABULARY, D), nn.Embedding(BLOCK, D), nn.Linear(D, VOCABULARY)

    def forward(self, idx):
        x = self.emb(idx) + self.pos.weight[None, : idx.size(1)]
        for step in range(3):
            x = self.layer(x + self.steps.weight[step])
        return self.out(x)


class UNetSkips(nn.Module):
    """Skips from the first half of the layers to the second, value embeddings mixed in, logits capped (speedruns)."""

    def __init__(self):
        super().__init__()
        self.emb, self.value, self.pos = (nn.Embedding(n, D) for n in (VOCABULARY, VOCABULARY, BLOCK))
        self.blocks = nn.ModuleList(PreNorm(Attention, lambda: MLP(lambda x: F.relu(x).square())) for _ in range(4))
        self.skip_weights = nn.Parameter(torch.ones(2) * 0.7)
        self.lambdas = nn.Parameter(torch.tensor([0.8, 0.3]))
        self.head = nn.Linear(D, VOCABULARY, bias=False)

    def forward(self, idx):
        x = x0 = F.rms_norm(self.emb(idx) + self.pos(torch.arange(idx.size(1))), (D,))
        skips = []
        for i in range(2):
            x = self.blocks[i](self.lambdas[0] * x + self.lambdas[1] * x0)
            skips.append(x)
        for i in range(2):
            x = self.blocks[2 + i](x + self.skip_weights[i] * skips.pop() + self.value(idx))
        logits = self.head(F.rms_norm(x, (x.size(-1),)))
        return 30 * torch.sigmoid(logits.float() / 7.5)


class HyperConnections(nn.Module):
    """Residual streams side by side on an axis of their own."""

    def __init__(self):
        super().__init__()
        self.emb, self.pos, self.out = nn.Embedding(VOCABULARY, D), nn.Embedding(BLOCK, D), nn.Linear(D, VOCABULARY)
        self.layers = nn.ModuleList([PreNorm(Attention) for _ in range(2)])
        self.read = nn.Parameter(torch.randn(2, 2) * 0.5 + 0.5)
        self.mix = nn.Parameter(torch.eye(2).repeat(2, 1, 1) + 0.1 * torch.randn(2, 2, 2))
        self.dynamic = nn.ModuleList([nn.Linear(D, 1) for _ in range(2)])

    def forward(self, idx):
        x = self.emb(idx) + self.pos(torch.arange(idx.size(1), device=idx.device))
        streams = x.unsqueeze(2).repeat(1, 1, 2, 1)
        for i, layer in enumerate(self.layers):
            h = torch.einsum("s,btsd->btd", self.read[i], streams)
            beta = torch.tanh(self.dynamic[i](streams))
            streams = torch.einsum("sr,btrd->btsd", self.mix[i], streams) + beta * layer(h).unsqueeze(2)
        return self.out(streams.sum(dim=2))


# -- mixtures of experts ---------------------------------------------------------------------------------------------


class DenseExperts(nn.Module):
    """All experts computed, and weighted."""

    def __init__(self, n=4):
        super().__init__()
        self.gate, self.experts = nn.Linear(D, n, bias=False), nn.ModuleList([MLP() for _ in range(n)])

    def forward(self, x):
        weights = F.softmax(self.gate(x), dim=-1)
        outputs = torch.stack([expert(x) for expert in self.experts], dim=2)
        return torch.sum(weights.unsqueeze(-1) * outputs, dim=2)


class DenseTopK(DenseExperts):
    """The two best of the gates, scattered into zeros or −inf; every expert computed all the same."""

    def forward(self, x):
        logits = self.gate(x)
        top, indices = logits.topk(2, dim=-1)
        gates = F.softmax(torch.full_like(logits, float("-inf")).scatter(-1, indices, top), dim=-1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            out = out + expert(x) * gates[..., i : i + 1]
        return out


class BmmExperts(nn.Module):
    """Each token's own experts' weights gathered, einsum."""

    def __init__(self, n=4):
        super().__init__()
        self.gate = nn.Linear(D, n)
        self.w1, self.w2 = nn.Parameter(torch.randn(n, D, 32) * 0.2), nn.Parameter(torch.randn(n, 32, D) * 0.2)

    def forward(self, x):
        scores, chosen = torch.topk(self.gate(x), 2, dim=-1)
        scores = scores.softmax(-1)
        h = F.silu(torch.einsum("btd,btkdh->btkh", x, self.w1[chosen]))
        return torch.einsum("btkh,btkhd,btk->btd", h, self.w2[chosen], scores)


class SparseExperts(DenseExperts):
    """index_add_ over the tokens of each expert, Mixtral's first implementation."""

    def forward(self, x):
        batch, length, width = x.shape
        flat = x.view(-1, width)
        weights, selected = torch.topk(F.softmax(self.gate(flat), dim=1, dtype=torch.float), 2, dim=-1)
        weights /= weights.sum(dim=-1, keepdim=True)
        final = torch.zeros_like(flat)
        mask = F.one_hot(selected, num_classes=len(self.experts)).permute(2, 1, 0)
        for e, expert in enumerate(self.experts):
            idx, top_x = torch.where(mask[e])
            current = expert(flat[None, top_x].reshape(-1, width)) * weights[top_x, idx, None]
            final.index_add_(0, top_x, current)
        return final.reshape(batch, length, width)


class MaskedExperts(DenseExperts):
    """x[mask], as mistral-inference and makeMoE have it."""

    def forward(self, x):
        flat = x.view(-1, x.shape[-1])
        weights, selected = torch.topk(self.gate(flat), 2)
        weights = F.softmax(weights, dim=1)
        results = torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            batch_idx, nth_expert = torch.where(selected == i)
            results[batch_idx] += weights[batch_idx, nth_expert, None] * expert(flat[batch_idx])
        return results.view_as(x)


class SwitchExperts(DenseExperts):
    """One expert a token; rows taken by nonzero and written back, skipped where there are none."""

    def forward(self, x):
        flat = x.reshape(-1, D)
        prob, routes = torch.max(F.softmax(self.gate(flat), -1), dim=-1)
        out = flat.new_zeros(flat.shape)
        for i, expert in enumerate(self.experts):
            idx = torch.eq(routes, i).nonzero(as_tuple=True)[0]
            out[idx, :] = expert(flat[idx, :])
        return (out * prob.view(-1, 1)).view(x.shape)


# -- models that are refused -----------------------------------------------------------------------------------------


class CausalConvolution(Attention):
    """A depthwise convolution over keys with padding on the left (token shift, Primer, canon layers)."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(D, D, kernel_size=3, groups=D)

    def forward(self, x):
        x = x + self.conv(F.pad(x.transpose(1, 2), (2, 0))).transpose(1, 2)
        return super().forward(x)


class TokenShift(Attention):
    """Half of the channels from the position before."""

    def forward(self, x):
        before, here = x.chunk(2, dim=-1)
        return super().forward(torch.cat((F.pad(before, (0, 0, 1, -1)), here), dim=-1))


def lm(attention, block=PreNorm, **options):
    return lambda: LM(lambda: block(attention), **options)


CASES = [
    Case("soft-capped", lm(SoftCapped, cap=10.0, norm=RMSNorm)),
    Case("cosine", lm(QKNorm, block=lambda a: PreNorm(a, norm=ScaleNorm))),
    Case("sink", lm(Sink, block=SandwichNorm), exports_file=True, seed=2),
    Case("softmax-one", lm(SoftmaxOne)),
    Case("null-key-value", lm(NullKeyValue)),
    Case("null-at-the-end", lm(NullAtTheEnd)),
    Case("sliding-window", lm(SlidingWindow, block=lambda a: PreNorm(a, SwiGLU, RMSNorm))),
    Case("strided", lm(Strided)),
    Case("talking-heads", lm(TalkingHeads, block=Parallel)),
    Case("sigmoid", lm(Sigmoid)),
    Case("differential", lm(Differential)),
    Case("multi-latent", lm(MultiLatent), exports_file=True, seed=4),
    Case("retention", lm(Retention)),
    Case("head-of-five", lm(lambda: Attention(head=5), block=lambda a: PreNorm(a, norm=AnnotatedNorm))),
    Case("values-of-another-size", lm(lambda: Attention(head=8, value=12))),
    Case("rezero", lm(Attention, block=ReZero)),
    Case("shared-keys-and-values", SharedKeysAndValues),
    Case("universal", Universal),
    Case("unet-skips", UNetSkips),
    Case("hyper-connections", HyperConnections),
    Case("experts-dense", lm(Attention, block=lambda a: PreNorm(a, DenseExperts))),
    Case("experts-top-k", lm(Attention, block=lambda a: PreNorm(a, DenseTopK))),
    Case("experts-gathered", lm(Attention, block=lambda a: PreNorm(a, BmmExperts))),
    Case("experts-index-add", lm(Attention, block=lambda a: PreNorm(a, SparseExperts)), exports_file=True, seed=3),
    Case("experts-masked", lm(Attention, block=lambda a: PreNorm(a, MaskedExperts))),
    Case("experts-switch", lm(Attention, block=lambda a: PreNorm(a, SwitchExperts))),
    Case("causal-convolution", lm(CausalConvolution)),
    Case("token-shift", lm(TokenShift)),
]

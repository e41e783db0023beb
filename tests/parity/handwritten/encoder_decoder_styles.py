"""Cases of encoder-decoders of well-known tutorials, with their masks."""

from __future__ import annotations

import copy
import math

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from einops import rearrange
from support.handwritten_case import BLOCK, PAD, VOCABULARY, Case

from tformer_export import causal, padding

D, H, HD = 24, 3, 8
PAIR = ("src", "tgt")


# -- The Annotated Transformer ---------------------------------------------------------------------------------------


def clones(module, N):
    return nn.ModuleList([copy.deepcopy(module) for _ in range(N)])


def subsequent_mask(size):
    attn_shape = (1, size, size)
    subsequent_mask = torch.triu(torch.ones(attn_shape), diagonal=1).type(torch.uint8)
    return subsequent_mask == 0


def attention(query, key, value, mask=None, dropout=None):
    d_k = query.size(-1)
    scores = torch.matmul(query, key.transpose(-2, -1)) / math.sqrt(d_k)
    if mask is not None:
        scores = scores.masked_fill(mask == 0, -1e9)
    p_attn = scores.softmax(dim=-1)
    if dropout is not None:
        p_attn = dropout(p_attn)
    return torch.matmul(p_attn, value), p_attn


class EncoderDecoder(nn.Module):
    def __init__(self, encoder, decoder, src_embed, tgt_embed, generator):
        super().__init__()
        self.encoder, self.decoder = encoder, decoder
        self.src_embed, self.tgt_embed, self.generator = src_embed, tgt_embed, generator

    def forward(self, src, tgt, src_mask, tgt_mask):
        return self.decode(self.encode(src, src_mask), src_mask, tgt, tgt_mask)

    def encode(self, src, src_mask):
        return self.encoder(self.src_embed(src), src_mask)

    def decode(self, memory, src_mask, tgt, tgt_mask):
        return self.decoder(self.tgt_embed(tgt), memory, src_mask, tgt_mask)


class Generator(nn.Module):
    def __init__(self, d_model, vocab):
        super().__init__()
        self.proj = nn.Linear(d_model, vocab)

    def forward(self, x):
        return F.log_softmax(self.proj(x), dim=-1)


class LayerNorm(nn.Module):
    def __init__(self, features, eps=1e-6):
        super().__init__()
        self.a_2 = nn.Parameter(torch.ones(features))
        self.b_2 = nn.Parameter(torch.zeros(features))
        self.eps = eps

    def forward(self, x):
        mean = x.mean(-1, keepdim=True)
        std = x.std(-1, keepdim=True)
        return self.a_2 * (x - mean) / (std + self.eps) + self.b_2


class SublayerConnection(nn.Module):
    def __init__(self, size, dropout):
        super().__init__()
        self.norm = LayerNorm(size)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, sublayer):
        return x + self.dropout(sublayer(self.norm(x)))


class Stack(nn.Module):
    def __init__(self, layer, N):
        super().__init__()
        self.layers = clones(layer, N)
        self.norm = LayerNorm(layer.size)

    def forward(self, x, *masks):
        for layer in self.layers:
            x = layer(x, *masks)
        return self.norm(x)


class EncoderLayer(nn.Module):
    def __init__(self, size, self_attn, feed_forward, dropout):
        super().__init__()
        self.self_attn, self.feed_forward = self_attn, feed_forward
        self.sublayer = clones(SublayerConnection(size, dropout), 2)
        self.size = size

    def forward(self, x, mask):
        x = self.sublayer[0](x, lambda x: self.self_attn(x, x, x, mask))
        return self.sublayer[1](x, self.feed_forward)


class DecoderLayer(nn.Module):
    def __init__(self, size, self_attn, src_attn, feed_forward, dropout):
        super().__init__()
        self.size = size
        self.self_attn, self.src_attn, self.feed_forward = self_attn, src_attn, feed_forward
        self.sublayer = clones(SublayerConnection(size, dropout), 3)

    def forward(self, x, memory, src_mask, tgt_mask):
        m = memory
        x = self.sublayer[0](x, lambda x: self.self_attn(x, x, x, tgt_mask))
        x = self.sublayer[1](x, lambda x: self.src_attn(x, m, m, src_mask))
        return self.sublayer[2](x, self.feed_forward)


class MultiHeadedAttention(nn.Module):
    def __init__(self, h, d_model, dropout=0.1):
        super().__init__()
        self.d_k = d_model // h
        self.h = h
        self.linears = clones(nn.Linear(d_model, d_model), 4)
        self.attn = None
        self.dropout = nn.Dropout(p=dropout)

    def forward(self, query, key, value, mask=None):
        if mask is not None:
            mask = mask.unsqueeze(1)
        nbatches = query.size(0)
        query, key, value = [
            lin(x).view(nbatches, -1, self.h, self.d_k).transpose(1, 2)
            for lin, x in zip(self.linears, (query, key, value))
        ]
        x, self.attn = attention(query, key, value, mask=mask, dropout=self.dropout)
        x = x.transpose(1, 2).contiguous().view(nbatches, -1, self.h * self.d_k)
        return self.linears[-1](x)


class PositionwiseFeedForward(nn.Module):
    def __init__(self, d_model, d_ff, dropout=0.1):
        super().__init__()
        self.w_1, self.w_2, self.dropout = nn.Linear(d_model, d_ff), nn.Linear(d_ff, d_model), nn.Dropout(dropout)

    def forward(self, x):
        return self.w_2(self.dropout(self.w_1(x).relu()))


class Embeddings(nn.Module):
    def __init__(self, d_model, vocab):
        super().__init__()
        self.lut, self.d_model = nn.Embedding(vocab, d_model), d_model

    def forward(self, x):
        return self.lut(x) * math.sqrt(self.d_model)


class PositionalEncoding(nn.Module):
    def __init__(self, d_model, dropout=0.1, max_len=5000):
        super().__init__()
        self.dropout = nn.Dropout(p=dropout)
        pe = torch.zeros(max_len, d_model)
        position = torch.arange(0, max_len).unsqueeze(1)
        div_term = torch.exp(torch.arange(0, d_model, 2) * -(math.log(10000.0) / d_model))
        pe[:, 0::2] = torch.sin(position * div_term)
        pe[:, 1::2] = torch.cos(position * div_term)
        pe = pe.unsqueeze(0)
        self.register_buffer("pe", pe)

    def forward(self, x):
        x = x + self.pe[:, : x.size(1)].requires_grad_(False)
        return self.dropout(x)


def make_model(N=2, d_model=D, d_ff=48, h=H, dropout=0.1):
    c = copy.deepcopy
    attn = MultiHeadedAttention(h, d_model)
    ff = PositionwiseFeedForward(d_model, d_ff, dropout)
    position = PositionalEncoding(d_model, dropout)
    model = EncoderDecoder(
        Stack(EncoderLayer(d_model, c(attn), c(ff), dropout), N),
        Stack(DecoderLayer(d_model, c(attn), c(attn), c(ff), dropout), N),
        nn.Sequential(Embeddings(d_model, VOCABULARY), c(position)),
        nn.Sequential(Embeddings(d_model, VOCABULARY), c(position)),
        Generator(d_model, VOCABULARY),
    )
    for p in model.parameters():
        if p.dim() > 1:
            nn.init.xavier_uniform_(p)
    return model


class Annotated(nn.Module):
    """The model with the masks of its Batch and its generator, which the original calls separately."""

    def __init__(self):
        super().__init__()
        self.model = make_model()

    @staticmethod
    def make_std_mask(tgt, pad):
        tgt_mask = (tgt != pad).unsqueeze(-2)
        return tgt_mask & subsequent_mask(tgt.size(-1)).type_as(tgt_mask.data)

    def forward(self, src, tgt):
        src_mask = (src != PAD).unsqueeze(-2)
        return self.model.generator(self.model.forward(src, tgt, src_mask, self.make_std_mask(tgt, PAD)))


class AnnotatedIn2018(Annotated):
    """The mask made by numpy, as in the first edition and in most copies of it."""

    @staticmethod
    def make_std_mask(tgt, pad):
        attn_shape = (1, tgt.size(-1), tgt.size(-1))
        subsequent_mask = np.triu(np.ones(attn_shape), k=1).astype("uint8")
        return (tgt != pad).unsqueeze(-2) & (torch.from_numpy(subsequent_mask) == 0)


class AnnotatedWithMasks(nn.Module):
    """The same with masks passed in."""

    def __init__(self):
        super().__init__()
        self.model = make_model(N=1)

    def forward(self, src, tgt, src_mask, tgt_mask):
        return self.model.generator(self.model.forward(src, tgt, src_mask.unsqueeze(-2), tgt_mask.unsqueeze(0)))


# -- bentrevett's seq2seq: positions by arange, masks of four dimensions, (output, attention) returned -----------------


class TrevettAttention(nn.Module):
    def __init__(self, hid_dim=D, n_heads=H, dropout=0.1):
        super().__init__()
        self.hid_dim, self.n_heads, self.head_dim = hid_dim, n_heads, hid_dim // n_heads
        self.fc_q, self.fc_k, self.fc_v, self.fc_o = (nn.Linear(hid_dim, hid_dim) for _ in range(4))
        self.dropout = nn.Dropout(dropout)
        self.scale = torch.sqrt(torch.FloatTensor([self.head_dim]))

    def forward(self, query, key, value, mask=None):
        batch_size = query.shape[0]
        Q = self.fc_q(query)
        K = self.fc_k(key)
        V = self.fc_v(value)
        Q = Q.view(batch_size, -1, self.n_heads, self.head_dim).permute(0, 2, 1, 3)
        K = K.view(batch_size, -1, self.n_heads, self.head_dim).permute(0, 2, 1, 3)
        V = V.view(batch_size, -1, self.n_heads, self.head_dim).permute(0, 2, 1, 3)
        energy = torch.matmul(Q, K.permute(0, 1, 3, 2)) / self.scale
        if mask is not None:
            energy = energy.masked_fill(mask == 0, -1e10)
        attention = torch.softmax(energy, dim=-1)
        x = torch.matmul(self.dropout(attention), V)
        x = x.permute(0, 2, 1, 3).contiguous()
        x = x.view(batch_size, -1, self.hid_dim)
        return self.fc_o(x), attention


class TrevettLayer(nn.Module):
    def __init__(self, cross):
        super().__init__()
        self.self_attention, self.self_attn_layer_norm = TrevettAttention(), nn.LayerNorm(D)
        self.ff_layer_norm, self.fc_1, self.fc_2 = nn.LayerNorm(D), nn.Linear(D, 48), nn.Linear(48, D)
        if cross:
            self.encoder_attention, self.enc_attn_layer_norm = TrevettAttention(), nn.LayerNorm(D)

    def forward(self, x, mask, enc_src=None, src_mask=None):
        attention = None
        _x, _ = self.self_attention(x, x, x, mask)
        x = self.self_attn_layer_norm(x + _x)
        if enc_src is not None:
            _x, attention = self.encoder_attention(x, enc_src, enc_src, src_mask)
            x = self.enc_attn_layer_norm(x + _x)
        return self.ff_layer_norm(x + self.fc_2(torch.relu(self.fc_1(x)))), attention


class TrevettStack(nn.Module):
    def __init__(self, cross):
        super().__init__()
        self.tok_embedding, self.pos_embedding = nn.Embedding(VOCABULARY, D), nn.Embedding(BLOCK, D)
        self.layers = nn.ModuleList([TrevettLayer(cross) for _ in range(1)])
        self.scale = torch.sqrt(torch.FloatTensor([D]))

    def forward(self, ids, *masks_and_memory):
        batch_size, length = ids.shape
        pos = torch.arange(0, length).unsqueeze(0).repeat(batch_size, 1)
        x = (self.tok_embedding(ids) * self.scale) + self.pos_embedding(pos)
        attention = None
        for layer in self.layers:
            x, attention = layer(x, *masks_and_memory)
        return x, attention


class Trevett(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder, self.fc_out = TrevettStack(False), TrevettStack(True), nn.Linear(D, VOCABULARY)
        self.src_pad_idx = self.trg_pad_idx = PAD

    def make_src_mask(self, src):
        return (src != self.src_pad_idx).unsqueeze(1).unsqueeze(2)

    def make_trg_mask(self, trg):
        trg_pad_mask = (trg != self.trg_pad_idx).unsqueeze(1).unsqueeze(2)
        trg_len = trg.shape[1]
        trg_sub_mask = torch.tril(torch.ones((trg_len, trg_len), device=trg.device)).bool()
        return trg_pad_mask & trg_sub_mask

    def forward(self, src, trg):
        src_mask, trg_mask = self.make_src_mask(src), self.make_trg_mask(trg)
        enc_src, _ = self.encoder(src, src_mask)
        output, attention = self.decoder(trg, trg_mask, enc_src, src_mask)
        return self.fc_out(output), attention


# -- masks made by comparing lists, keys masked and queries masked too (attention-is-all-you-need-pytorch, Kyubyong) ---


def get_attn_key_pad_mask(seq_k, seq_q):
    len_q = seq_q.size(1)
    padding_mask = seq_k.eq(PAD)
    return padding_mask.unsqueeze(1).expand(-1, len_q, -1)


def get_subsequent_mask(seq):
    sz_b, len_s = seq.size()
    subsequent_mask = torch.triu(torch.ones((len_s, len_s), device=seq.device, dtype=torch.uint8), diagonal=1)
    return subsequent_mask.unsqueeze(0).expand(sz_b, -1, -1)


class YuHsiangAttention(nn.Module):
    """Heads merged in front of the batch, (H · B, T, d), with the mask repeated."""

    def __init__(self, n_head=H, d_model=D, d_k=HD, d_v=HD):
        super().__init__()
        self.n_head, self.d_k, self.d_v = n_head, d_k, d_v
        self.w_qs, self.w_ks = nn.Linear(d_model, n_head * d_k), nn.Linear(d_model, n_head * d_k)
        self.w_vs, self.fc = nn.Linear(d_model, n_head * d_v), nn.Linear(n_head * d_v, d_model)
        self.layer_norm = nn.LayerNorm(d_model)
        self.temperature = d_k**0.5

    def forward(self, q, k, v, mask=None):
        d_k, d_v, n_head = self.d_k, self.d_v, self.n_head
        sz_b, len_q, _ = q.size()
        sz_b, len_k, _ = k.size()
        sz_b, len_v, _ = v.size()
        residual = q
        q = self.w_qs(q).view(sz_b, len_q, n_head, d_k)
        k = self.w_ks(k).view(sz_b, len_k, n_head, d_k)
        v = self.w_vs(v).view(sz_b, len_v, n_head, d_v)
        q = q.permute(2, 0, 1, 3).contiguous().view(-1, len_q, d_k)
        k = k.permute(2, 0, 1, 3).contiguous().view(-1, len_k, d_k)
        v = v.permute(2, 0, 1, 3).contiguous().view(-1, len_v, d_v)
        mask = mask.repeat(n_head, 1, 1)
        attn = torch.bmm(q, k.transpose(1, 2)) / self.temperature
        attn = attn.masked_fill(mask, -float("inf"))
        attn = torch.softmax(attn, dim=2)
        output = torch.bmm(attn, v).view(n_head, sz_b, len_q, d_v)
        output = output.permute(1, 2, 0, 3).contiguous().view(sz_b, len_q, -1)
        return self.layer_norm(self.fc(output) + residual), attn


class YuHsiangFeedForward(nn.Module):
    """Position-wise by convolutions of width one."""

    def __init__(self, d_in=D, d_hid=48):
        super().__init__()
        self.w_1, self.w_2 = nn.Conv1d(d_in, d_hid, 1), nn.Conv1d(d_hid, d_in, 1)
        self.layer_norm = nn.LayerNorm(d_in)

    def forward(self, x):
        output = self.w_2(F.relu(self.w_1(x.transpose(1, 2)))).transpose(1, 2)
        return self.layer_norm(output + x)


class YuHsiang(nn.Module):
    """Non-padding masks multiplied after each sublayer; the output's weight tied and scaled."""

    def __init__(self):
        super().__init__()
        self.src_word_emb, self.trg_word_emb = (nn.Embedding(VOCABULARY, D, padding_idx=PAD) for _ in range(2))
        self.position_enc = nn.Embedding.from_pretrained(self.table(BLOCK + 1), freeze=True)
        self.enc_attn, self.enc_ffn = nn.ModuleList([YuHsiangAttention()]), nn.ModuleList([YuHsiangFeedForward()])
        self.dec_attn, self.dec_ffn = nn.ModuleList([YuHsiangAttention()]), nn.ModuleList([YuHsiangFeedForward()])
        self.cross = nn.ModuleList([YuHsiangAttention()])
        self.trg_word_prj = nn.Linear(D, VOCABULARY, bias=False)
        self.trg_word_prj.weight = self.trg_word_emb.weight
        self.x_logit_scale = D**-0.5

    @staticmethod
    def table(n_position):
        angles = [[pos / 10000 ** (2 * (i // 2) / D) for i in range(D)] for pos in range(n_position)]
        table = torch.tensor(angles)
        table[:, 0::2], table[:, 1::2] = torch.sin(table[:, 0::2]), torch.cos(table[:, 1::2])
        table[0] = 0.0
        return table

    def positions(self, seq):
        return (torch.arange(seq.size(1)) + 1).expand(seq.size(0), -1) * seq.ne(PAD)

    def forward(self, src_seq, trg_seq):
        non_pad = src_seq.ne(PAD).type(torch.float).unsqueeze(-1)
        mask = get_attn_key_pad_mask(seq_k=src_seq, seq_q=src_seq)
        x = self.src_word_emb(src_seq) + self.position_enc(self.positions(src_seq))
        for attn, ffn in zip(self.enc_attn, self.enc_ffn):
            x, _ = attn(x, x, x, mask=mask)
            x = ffn(x * non_pad) * non_pad
        non_pad = trg_seq.ne(PAD).type(torch.float).unsqueeze(-1)
        slf_mask = (get_attn_key_pad_mask(seq_k=trg_seq, seq_q=trg_seq) + get_subsequent_mask(trg_seq)).gt(0)
        dec_enc_mask = get_attn_key_pad_mask(seq_k=src_seq, seq_q=trg_seq)
        y = self.trg_word_emb(trg_seq) + self.position_enc(self.positions(trg_seq))
        for attn, cross, ffn in zip(self.dec_attn, self.cross, self.dec_ffn):
            y, _ = attn(y, y, y, mask=slf_mask)
            y, _ = cross(y * non_pad, x, x, mask=dec_enc_mask)
            y = ffn(y * non_pad) * non_pad
        return self.trg_word_prj(y) * self.x_logit_scale


# -- attention weights kept on the module, -1e9 filled in place, residuals that normalise (a video tutorial) -----------


class JamilAttention(nn.Module):
    def __init__(self, d_model=D, h=H):
        super().__init__()
        self.h, self.d_k = h, d_model // h
        self.w_q, self.w_k, self.w_v, self.w_o = (nn.Linear(d_model, d_model, bias=False) for _ in range(4))

    @staticmethod
    def attention(query, key, value, mask):
        d_k = query.shape[-1]
        attention_scores = (query @ key.transpose(-2, -1)) / math.sqrt(d_k)
        if mask is not None:
            attention_scores.masked_fill_(mask == 0, -1e9)
        attention_scores = attention_scores.softmax(dim=-1)
        return (attention_scores @ value), attention_scores

    def forward(self, q, k, v, mask):
        query, key, value = self.w_q(q), self.w_k(k), self.w_v(v)
        query = query.view(query.shape[0], query.shape[1], self.h, self.d_k).transpose(1, 2)
        key = key.view(key.shape[0], key.shape[1], self.h, self.d_k).transpose(1, 2)
        value = value.view(value.shape[0], value.shape[1], self.h, self.d_k).transpose(1, 2)
        x, self.attention_scores = JamilAttention.attention(query, key, value, mask)
        x = x.transpose(1, 2).contiguous().view(x.shape[0], -1, self.h * self.d_k)
        return self.w_o(x)


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.alpha, self.bias = nn.Parameter(torch.ones(D)), nn.Parameter(torch.zeros(D))

    def forward(self, x, sublayer):
        mean, std = x.mean(dim=-1, keepdim=True), x.std(dim=-1, keepdim=True)
        return x + sublayer(self.alpha * (x - mean) / (std + 1e-6) + self.bias)


class Jamil(nn.Module):
    """Called by encode and decode with int masks, the target's with `== 0` of a triu."""

    def __init__(self):
        super().__init__()
        self.src_embed, self.tgt_embed = nn.Embedding(VOCABULARY, D), nn.Embedding(VOCABULARY, D)
        self.pos = PositionalEncoding(D, max_len=BLOCK)
        self.enc = nn.ModuleDict({"attn": JamilAttention(), "r0": Residual(), "r1": Residual()})
        self.dec = nn.ModuleDict(
            {"attn": JamilAttention(), "cross": JamilAttention(), "r0": Residual(), "r1": Residual(), "r2": Residual()}
        )
        self.ff = nn.ModuleList(nn.Sequential(nn.Linear(D, 48), nn.ReLU(), nn.Linear(48, D)) for _ in range(2))
        self.proj = nn.Linear(D, VOCABULARY)

    def encode(self, src, mask):
        x = self.pos(self.src_embed(src) * math.sqrt(D))
        x = self.enc["r0"](x, lambda x: self.enc["attn"](x, x, x, mask))
        return self.enc["r1"](x, self.ff[0])

    def decode(self, memory, src_mask, tgt, tgt_mask):
        x = self.pos(self.tgt_embed(tgt) * math.sqrt(D))
        x = self.dec["r0"](x, lambda x: self.dec["attn"](x, x, x, tgt_mask))
        x = self.dec["r1"](x, lambda x: self.dec["cross"](x, memory, memory, src_mask))
        return self.dec["r2"](x, self.ff[1])

    def forward(self, encoder_input, decoder_input):
        encoder_mask = (encoder_input != PAD).unsqueeze(1).unsqueeze(1).int()
        decoder_mask = (decoder_input != PAD).unsqueeze(1).int()
        size = decoder_input.size(1)
        decoder_mask = decoder_mask & (torch.triu(torch.ones((1, size, size)), diagonal=1).type(torch.int) == 0)
        out = self.decode(
            self.encode(encoder_input, encoder_mask), encoder_mask, decoder_input, decoder_mask.unsqueeze(1)
        )
        return self.proj(out)


# -- PyTorch's tutorial on translation: nn.Transformer, time first, create_mask ---------------------------------------


def generate_square_subsequent_mask(sz):
    mask = (torch.triu(torch.ones((sz, sz))) == 1).transpose(0, 1)
    return mask.float().masked_fill(mask == 0, float("-inf")).masked_fill(mask == 1, float(0.0))


def create_mask(src, tgt):
    src_seq_len = src.shape[0]
    tgt_seq_len = tgt.shape[0]
    tgt_mask = generate_square_subsequent_mask(tgt_seq_len)
    src_mask = torch.zeros((src_seq_len, src_seq_len)).type(torch.bool)
    src_padding_mask = (src == PAD).transpose(0, 1)
    tgt_padding_mask = (tgt == PAD).transpose(0, 1)
    return src_mask, tgt_mask, src_padding_mask, tgt_padding_mask


class TimeFirstPositions(nn.Module):
    def __init__(self, emb_size=D, dropout=0.1, maxlen=64):
        super().__init__()
        den = torch.exp(-torch.arange(0, emb_size, 2) * math.log(10000) / emb_size)
        pos = torch.arange(0, maxlen).reshape(maxlen, 1)
        pos_embedding = torch.zeros((maxlen, emb_size))
        pos_embedding[:, 0::2] = torch.sin(pos * den)
        pos_embedding[:, 1::2] = torch.cos(pos * den)
        pos_embedding = pos_embedding.unsqueeze(-2)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("pos_embedding", pos_embedding)

    def forward(self, token_embedding):
        return self.dropout(token_embedding + self.pos_embedding[: token_embedding.size(0), :])


class Seq2SeqTransformer(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.transformer = nn.Transformer(D, H, 1, 1, 48, 0.1, **options)
        self.generator = nn.Linear(D, VOCABULARY)
        self.src_tok_emb, self.tgt_tok_emb = Embeddings(D, VOCABULARY), Embeddings(D, VOCABULARY)
        self.positional_encoding = TimeFirstPositions()

    def forward(self, src, trg):
        src_mask, tgt_mask, src_padding_mask, tgt_padding_mask = create_mask(src, trg)
        src_emb = self.positional_encoding(self.src_tok_emb(src.long()))
        tgt_emb = self.positional_encoding(self.tgt_tok_emb(trg.long()))
        outs = self.transformer(
            src_emb, tgt_emb, src_mask, tgt_mask, None, src_padding_mask, tgt_padding_mask, src_padding_mask
        )
        return self.generator(outs)


class TorchPair(nn.Module):
    """nn.TransformerEncoder and nn.TransformerDecoder by themselves, batch first, pre-norm and gelu."""

    def __init__(self, norm_first=True, activation="gelu"):
        super().__init__()
        options = dict(activation=activation, batch_first=True, norm_first=norm_first)
        self.emb, self.pos = nn.Embedding(VOCABULARY, D), nn.Embedding(BLOCK, D)
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(D, H, 48, 0.1, **options), 1, nn.LayerNorm(D), enable_nested_tensor=False
        )
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(D, H, 48, 0.1, **options), 1, nn.LayerNorm(D))
        self.out = nn.Linear(D, VOCABULARY)

    def embed(self, ids):
        return self.emb(ids) + self.pos(torch.arange(ids.shape[1], device=ids.device)).unsqueeze(0)

    def forward(self, src, tgt):
        pad = src.eq(PAD)
        memory = self.encoder(self.embed(src), src_key_padding_mask=pad)
        mask = torch.triu(torch.full((tgt.size(1), tgt.size(1)), True), diagonal=1)
        y = self.decoder(
            self.embed(tgt), memory, tgt_mask=mask, memory_key_padding_mask=pad, tgt_key_padding_mask=tgt.eq(PAD)
        )
        return {"hidden": None, "logits": self.out(y)}


class TiedEncoderDecoder(nn.Module):
    """Described masks, additive for the target; one embedding for source, target and output; einsum everywhere."""

    def __init__(self):
        super().__init__()
        self.emb, self.pos = nn.Embedding(VOCABULARY, D), nn.Embedding(BLOCK, D)
        self.w = nn.ParameterList([nn.Parameter(torch.randn(4, D, H, HD) * 0.2) for _ in range(3)])
        self.norms = nn.ModuleList(nn.LayerNorm(D) for _ in range(6))
        self.ff = nn.ModuleList(nn.Sequential(nn.Linear(D, 48), nn.SiLU(), nn.Linear(48, D)) for _ in range(2))

    def attend(self, w, x, y, bias):
        q, k, v = (
            torch.einsum("btc,chd->bthd", x, w[0]),
            torch.einsum("btc,chd->bthd", y, w[1]),
            torch.einsum("btc,chd->bthd", y, w[2]),
        )
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * HD**-0.5 + bias
        out = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v)
        return torch.einsum("bqhd,chd->bqc", out, w[3])

    def forward(self, src, tgt, src_mask, tgt_mask):
        pad = (1.0 - src_mask[:, None, None, :].float()) * -10000.0
        x = self.emb(src) + self.pos(torch.arange(src.size(1)))
        h = self.norms[0](x)
        x = x + self.attend(self.w[0], h, h, pad)
        x = x + self.ff[0](self.norms[1](x))
        y = self.emb(tgt) + self.pos(torch.arange(tgt.size(1)))
        h = self.norms[2](y)
        y = y + self.attend(self.w[1], h, h, tgt_mask)
        y = y + self.attend(self.w[2], self.norms[3](y), x, pad)
        y = y + self.ff[1](self.norms[4](y))
        return self.norms[5](y) @ self.emb.weight.t()


class Captioner(nn.Module):
    """Cross-attention to a prefix: the encoder's output is projected, pooled by learned queries (Perceiver) first."""

    def __init__(self):
        super().__init__()
        self.src, self.tgt, self.pos = nn.Embedding(VOCABULARY, D), nn.Embedding(VOCABULARY, D), nn.Embedding(BLOCK, D)
        self.latents = nn.Parameter(torch.randn(4, D))
        self.pool = nn.MultiheadAttention(D, H, batch_first=True)
        self.layer = nn.TransformerDecoderLayer(D, H, 48, batch_first=True)
        self.out = nn.Linear(D, VOCABULARY)

    def forward(self, src, tgt):
        x = self.src(src) + self.pos.weight[: src.size(1)]
        memory, _ = self.pool(self.latents.expand(src.size(0), -1, -1), x, x, key_padding_mask=src == PAD)
        y = self.tgt(tgt) + self.pos.weight[: tgt.size(1)]
        mask = nn.Transformer.generate_square_subsequent_mask(tgt.size(1))
        return self.out(self.layer(y, memory, tgt_mask=mask))


class Gated(nn.Module):
    """Flamingo's: cross-attention behind a tanh gate, keys of latents and of the past in one softmax."""

    def __init__(self):
        super().__init__()
        self.src, self.tgt, self.pos = nn.Embedding(VOCABULARY, D), nn.Embedding(VOCABULARY, D), nn.Embedding(BLOCK, D)
        self.to_q, self.to_kv, self.to_out = nn.Linear(D, D), nn.Linear(D, 2 * D), nn.Linear(D, D)
        self.gate, self.norm = nn.Parameter(torch.tensor([0.5])), nn.LayerNorm(D)
        self.out = nn.Linear(D, VOCABULARY)

    def forward(self, src, tgt):
        x, y = self.src(src), self.tgt(tgt) + self.pos.weight[: tgt.size(1)]
        q = rearrange(self.to_q(self.norm(y)), "b n (h d) -> b h n d", h=H) * HD**-0.5
        kv = torch.cat((x, y), dim=1)
        k, v = (rearrange(t, "b n (h d) -> b h n d", h=H) for t in self.to_kv(self.norm(kv)).chunk(2, dim=-1))
        n = y.size(1)
        past = torch.tril(torch.ones(n, n, dtype=torch.bool)).expand(y.size(0), 1, n, n)
        seen = (src != PAD)[:, None, None, :].expand(-1, 1, n, -1)
        sim = (q @ k.transpose(-1, -2)).masked_fill(~torch.cat((seen, past), -1), -1e9)
        attended = rearrange(sim.softmax(-1) @ v, "b h n d -> b n (h d)")
        return self.out(y + self.gate.tanh() * self.to_out(attended))


def visible(src, tgt):
    return torch.ones_like(src, dtype=torch.bool)


CASES = [
    Case("annotated", Annotated, PAIR, exports_file=True, seed=1),
    Case("annotated-in-2018", AnnotatedIn2018, PAIR, exports_file=True, seed=1, thorough=True),
    Case(
        "annotated-with-masks",
        AnnotatedWithMasks,
        PAIR,
        masks={
            "src_mask": (padding("src"), visible),
            "tgt_mask": (causal("tgt"), lambda src, tgt: subsequent_mask(tgt.size(1))[0]),
        },
    ),
    Case("bentrevett", Trevett, ("src", "trg"), seed=3),
    Case(
        "yu-hsiang",
        YuHsiang,
        ("src_seq", "trg_seq"),
        exports_file=True,
        seed=24,
    ),
    Case("jamil", Jamil, ("encoder_input", "decoder_input")),
    Case("torch-translation-time-first", Seq2SeqTransformer, ("src", "trg"), time_first=True, seed=3),
    Case("torch-pair-pre-gelu", TorchPair, PAIR, exports_file=True, seed=6),
    Case("torch-pair-post-relu", lambda: TorchPair(False, "relu"), PAIR),
    Case(
        "tied-einsum-with-masks",
        TiedEncoderDecoder,
        PAIR,
        masks={
            "src_mask": (padding("src"), visible),
            "tgt_mask": (
                causal("tgt", keep="additive"),
                lambda src, tgt: torch.full((tgt.size(1), tgt.size(1)), float("-inf")).triu(1),
            ),
        },
    ),
    Case("perceiver-pooled", Captioner, PAIR),
    Case("one-softmax-over-source-and-past", Gated, PAIR, refusal="write it in one of these ways"),
]

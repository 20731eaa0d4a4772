"""The text: the documentation topics that CPython ships (`help("if")` prints them), as bytes.

Some topics are part of others ("if" is a section of "compound"), so paragraphs that were seen before are
dropped: otherwise the validation part would hold what was trained on.
"""

from __future__ import annotations

import importlib
import math
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch

VOCABULARY = 256  # bytes
MIN_DUPLICATE_CHARS = 40  # shorter paragraphs ("Example:") may repeat
BLOCK_BYTES = 4096  # paragraphs are kept together in blocks of about this size when the text is split
VALIDATION_EVERY = 10  # every tenth block is held out


class CorpusError(ValueError):
    """The text is missing or too small."""


@dataclass(frozen=True)
class Corpus:
    """Bytes to train on and bytes held out (uint8, 1-D), and the whole text's entropies in nats per byte.

    `unigram_entropy` is the loss of the best model that ignores context, `bigram_entropy` that of the best
    table of byte pairs fitted to this very text.
    """

    name: str
    train: torch.Tensor
    validation: torch.Tensor
    unigram_entropy: float
    bigram_entropy: float

    @property
    def size(self) -> int:
        """Bytes of training and validation text."""
        return self.train.numel() + self.validation.numel()


def _python_topics() -> tuple[str, list[str]]:
    version = f"CPython {sys.version_info.major}.{sys.version_info.minor}"
    try:
        topics = importlib.import_module("pydoc_data.topics").topics
    except (ModuleNotFoundError, AttributeError) as error:
        raise CorpusError(
            f"this Python ({version}) comes without its documentation topics (pydoc_data.topics): {error}; "
            "give a text of your own with --text FILE"
        ) from error
    if not isinstance(topics, Mapping) or not topics:
        raise CorpusError(
            f"pydoc_data.topics of {version} holds no topics; give a text of your own with --text FILE"
        )
    # Longest first, so that a section that is also a topic stays where its chapter is.
    texts = sorted((str(text) for text in topics.values()), key=lambda text: (-len(text), text))
    return f"the documentation topics of {version}", texts


def _unique_paragraphs(texts: list[str]) -> Iterator[str]:
    seen: set[str] = set()
    for text in texts:
        for paragraph in text.split("\n\n"):
            key = paragraph.strip()
            if key in seen and len(key) >= MIN_DUPLICATE_CHARS:
                continue
            seen.add(key)
            yield paragraph


def _blocks(paragraphs: Iterator[str]) -> list[bytes]:
    blocks: list[bytes] = []
    block = b""
    for paragraph in paragraphs:
        block += paragraph.encode() + b"\n\n"
        if len(block) >= BLOCK_BYTES:
            blocks.append(block)
            block = b""
    if block:
        blocks.append(block)
    return blocks


def _entropy(counts: Counter[int] | Counter[tuple[int, int]]) -> float:
    total = sum(counts.values())
    return -sum(count / total * math.log(count / total) for count in counts.values())


def unigram_entropy(text: bytes) -> float:
    """Entropy of one byte of `text`, in nats."""
    return _entropy(Counter(text))


def bigram_entropy(text: bytes) -> float:
    """Entropy of one byte of `text` given the byte before it, in nats: H(pair) - H(first of pair)."""
    return _entropy(Counter(pairwise(text))) - _entropy(Counter(text[:-1]))


def load_corpus(path: Path | None, min_bytes: int) -> Corpus:
    """Read the text (CPython's topics when `path` is None), drop repeated paragraphs, and split it.

    `min_bytes` is what each part must hold at least (one training window). Raises CorpusError when it does
    not.
    """
    if path is None:
        name, texts = _python_topics()
    else:
        try:
            name, texts = str(path), [path.read_text(encoding="utf-8", errors="replace")]
        except OSError as error:
            raise CorpusError(f"--text {path}: {error.strerror or error}") from error
    blocks = _blocks(_unique_paragraphs(texts))
    held_out = [block for i, block in enumerate(blocks) if i % VALIDATION_EVERY == VALIDATION_EVERY - 1]
    trained = [block for i, block in enumerate(blocks) if i % VALIDATION_EVERY != VALIDATION_EVERY - 1]
    train, validation = b"".join(trained), b"".join(held_out)
    if min(len(train), len(validation)) < min_bytes:
        raise CorpusError(
            f"{name}: {len(train)} bytes to train on and {len(validation)} held out, but each needs "
            f"{min_bytes} for one "
            f"sequence; give a longer text (at least {VALIDATION_EVERY * (BLOCK_BYTES + min_bytes)} bytes) "
            f"or a smaller "
            "--seq-len"
        )
    whole = b"".join(blocks)
    return Corpus(
        name=name,
        train=torch.frombuffer(bytearray(train), dtype=torch.uint8),
        validation=torch.frombuffer(bytearray(validation), dtype=torch.uint8),
        unigram_entropy=unigram_entropy(whole),
        bigram_entropy=bigram_entropy(whole),
    )


def sample_windows(
    text: torch.Tensor, count: int, length: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """`count` random windows: inputs and the bytes that follow them, both int64 [count, length]."""
    starts = torch.randint(0, text.numel() - length, (count, 1), generator=generator)
    windows = text[starts + torch.arange(length + 1)].long()
    return windows[:, :-1], windows[:, 1:]

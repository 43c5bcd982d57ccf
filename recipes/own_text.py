"""Text classification with a loss, metrics and batches of your own.

    ftopt cp own_text           copies this file and own_text.yaml, to edit them
    ftopt run own_text.yaml

A sample is a dict of a text of any length and its label: a line of Python's own library that is a comment, a
definition, an import or another statement. (The first word or sign, which gives it away, is removed.)
`Lines.collate_fn` pads the texts of a batch; `Classify` computes the loss and the metrics.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

LABELS = ("comment", "definition", "import", "statement")
_STARTS = (("#",), ("def ", "class "), ("import ", "from "))
Sample = dict[str, Any]


class Lines(Dataset[Sample]):
    """Lines of text with their labels."""

    random = False

    def __init__(self, texts: list[str], labels: list[int]) -> None:
        self.texts, self.labels = texts, labels

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> Sample:
        return {"bytes": torch.tensor(list(self.texts[index].encode()[:80])), "label": self.labels[index]}

    def collate_fn(self, samples: list[Sample]) -> dict[str, Tensor]:
        """Bytes (batch, longest), int64, 0 behind a text's end; labels (batch,)."""
        padded = nn.utils.rnn.pad_sequence([sample["bytes"] for sample in samples], batch_first=True)
        return {"bytes": padded, "label": torch.tensor([sample["label"] for sample in samples])}


def data(per_label: int = 1500) -> tuple[Lines, Lines]:
    """As many lines of each label; every tenth is held out."""
    found: list[list[str]] = [[] for _ in LABELS]
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        for line in map(str.strip, path.read_text(encoding="utf-8", errors="replace").splitlines()):
            label = next((number for number, starts in enumerate(_STARTS) if line.startswith(starts)), 3)
            rest = line.lstrip("# ") if label == 0 else line.partition(" ")[2] if label < 3 else line
            if len(rest) > 5 and len(found[label]) < per_label:
                found[label].append(rest)
    pairs = [(text, label) for texts in zip(*found, strict=False) for label, text in enumerate(texts)]
    train, held_out = [p for i, p in enumerate(pairs) if i % 10], pairs[::10]
    return Lines(*map(list, zip(*train, strict=True))), Lines(*map(list, zip(*held_out, strict=True)))


class Classifier(nn.Module):
    """Bytes (batch, length), int64, 0 for none, to logits (batch, labels)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width, padding_idx=0)
        self.mix = nn.Conv1d(width, width, 5, padding=2)
        self.head = nn.Linear(width, len(LABELS))

    def forward(self, text: Tensor) -> Tensor:
        x = self.embed(text)
        x = x + nn.functional.gelu(self.mix(x.transpose(1, 2))).transpose(1, 2)
        return torch.as_tensor(self.head(x.masked_fill((text == 0).unsqueeze(-1), -10).amax(1)))


def model(width: int = 64) -> nn.Module:
    return Classifier(width)


class Classify:
    """What is minimized, and what an evaluation reports. ``samples`` and ``tokens`` may be left out."""

    def __init__(self, smoothing: float = 0.05) -> None:
        self.smoothing = smoothing

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """The batch's mean."""
        logits = model(batch["bytes"])
        return nn.functional.cross_entropy(logits, batch["label"], label_smoothing=self.smoothing)

    def metrics(self, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, float]:
        """Means over the batch; the job's are means over all held-out samples."""
        answer, label = model(batch["bytes"]).argmax(-1), batch["label"]
        import_, right = LABELS.index("import"), answer == label
        recalled = (answer == import_) | (label != import_)
        return {"accuracy": float(right.float().mean()), "imports_found": float(recalled.float().mean())}

    def tokens(self, batch: dict[str, Tensor]) -> int:
        """What ``weights: tokens`` counts."""
        return int((batch["bytes"] != 0).sum())

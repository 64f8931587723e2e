"""Draw the loss curves of a run: ``python -m server.demo.training.plot RUN_FOLDER IMAGE``.

Needs matplotlib, which the server itself does not.
"""

import csv
import sys
from pathlib import Path


def read_columns(path: Path) -> dict[str, list[float]]:
    """The columns of a CSV file of numbers, by name."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    return {name: [float(row[name]) for row in rows] for name in rows[0]}


def draw(folder: Path, image: Path) -> None:
    """Draw ``target.csv`` and ``head_*.csv`` of ``folder`` into one image."""
    from matplotlib import pyplot

    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(13, 3.8), layout="constrained")
    target = read_columns(folder / "target.csv")
    for name in ("train_loss", "validation_loss", "held_out_loss"):
        left.plot([n / 1e6 for n in target["tokens"]], target[name], label=name.replace("_", " "))
    left.set(title="Target", xlabel="million tokens", ylabel="nats per token", ylim=(1.1, 3.2))
    left.legend()
    for path in sorted(folder.glob("head_*.csv")):
        head, name = read_columns(path), path.stem.removeprefix("head_")
        losses = [sum(values) / 4 for values in zip(*(head[f"loss_{j}"] for j in range(4)), strict=True)]
        middle.plot(head["step"], losses, marker=".", label=name)
        right.plot(head["step"], head["acceptance_length"], marker=".", label=name)
    middle.set(title="Heads: mean loss of draft steps 1 to 4", xlabel="step", ylabel="nats per token")
    right.set(title="Heads: acceptance length on held-out prompts", xlabel="step", ylabel="tokens per step")
    middle.legend()
    right.legend()
    image.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(str(image), dpi=110)


if __name__ == "__main__":
    draw(Path(sys.argv[1]), Path(sys.argv[2]))

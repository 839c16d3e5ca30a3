"""What several of the scripts draw: accuracy by epoch with either loss, and maps of classes."""

import matplotlib.pyplot as plt

COLOURS = {"cross-entropy": "tab:orange", "bi-tempered": "tab:blue"}


def draw(axes, runs, title):
    """Draw and print the accuracies of each run; return those of the last epoch."""
    for name, accuracies in runs.items():
        said = f"{name}: {accuracies[-1]:.1%}"
        axes.plot(range(1, 1 + len(accuracies)), accuracies, color=COLOURS[name], label=said)
        print(f"{said} of the clean test labels right")
    axes.set(xlabel="epoch", ylabel="clean test labels right", title=title)
    axes.legend(title="after the last epoch")
    return {name: accuracies[-1] for name, accuracies in runs.items()}


def save(canvas, figure):
    if figure:
        canvas.savefig(figure, dpi=110)
    plt.close(canvas)


def figure(runs, title, path):
    """The same as a figure of its own."""
    canvas, axes = plt.subplots(figsize=(6, 3.4), layout="constrained")
    last = draw(axes, runs, title)
    save(canvas, path)
    return last


def maps(shown, nothing, path):
    """Draw pictures (H, W) of classes under their titles; the class `nothing` is white."""
    canvas, panels = plt.subplots(1, len(shown), figsize=(10, 2.9), layout="constrained")
    for axes, (title, classes) in zip(panels, shown.items(), strict=True):
        picture = classes.double().masked_fill(classes == nothing, float("nan")).numpy()
        axes.imshow(picture, cmap="Set2", vmin=0, vmax=7)
        axes.set(title=title, xticks=[], yticks=[])
    save(canvas, path)

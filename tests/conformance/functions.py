"""What is trained in the table: a function that brings its own imports, as both ask for."""


def train_model(lr: float = 0.1, epochs: int = 1) -> None:
    import os

    print(f"rank {os.environ.get('RANK', '0')}: {epochs} epochs at {lr}")

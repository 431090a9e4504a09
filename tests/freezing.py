"""What tests of folded values share."""

from tritium.compiler.passes import freezing


def count_folding(monkeypatch) -> list[int]:
    """A list that grows by one whenever folded values are computed."""
    runs: list[int] = []
    original = freezing.FoldedValues.of

    def counted(self, sources):
        program = self.program
        self.program = lambda *args: (runs.append(1), program(*args))[1]
        try:
            return original(self, sources)
        finally:
            self.program = program

    monkeypatch.setattr(freezing.FoldedValues, "of", counted)
    return runs

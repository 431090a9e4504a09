"""What tests of frozen values share."""

from tritium.compiler.passes import freezing


def count_freezing(monkeypatch) -> list[int]:
    """A list that grows by one whenever frozen values are computed."""
    runs: list[int] = []
    original = freezing.FrozenValues.of

    def counted(self, sources):
        program = self.program
        self.program = lambda *args: (runs.append(1), program(*args))[1]
        try:
            return original(self, sources)
        finally:
            self.program = program

    monkeypatch.setattr(freezing.FrozenValues, "of", counted)
    return runs

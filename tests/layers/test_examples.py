"""The examples about layers run, and say what they promise."""

import pytest

import scripts


def load(name):
    return scripts.load(f"examples/{name}.py")


def test_sparse_attention(tmp_path, capsys):
    pytest.importorskip("diffusers")
    found = load("sparse_attention").main(tmp_path)
    assert 0.5 < found["density"] < 0.8
    # 30.8 dB where this was written; as many blocks, drawn at random instead of by likeness, gave 14.7.
    assert found["psnr"] > 28
    assert (tmp_path / "dense-and-sparse.png").is_file()
    assert "of dense attention's work was done" in capsys.readouterr().out


def test_attention(capsys):
    lines = load("attention").main()
    winners = [line for line in lines if " won: " in line]
    assert len(winners) == 2
    assert all("sdpa" in line and "ms" in line for line in winners)
    assert any("did not take part" in line for line in lines)
    assert capsys.readouterr().out.strip() == "\n".join(lines)

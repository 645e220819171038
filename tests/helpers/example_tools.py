"""The tool and the environments of examples/, by name."""

from pathlib import Path

_EXAMPLES = Path(__file__).parents[2] / "examples"
CALCULATOR = f"{_EXAMPLES}/tools/calculator.py:calculator"
GYMNASIUM = f"{_EXAMPLES}/environments/gymnasium_text.py:GymnasiumText"
TEXTARENA = f"{_EXAMPLES}/environments/textarena_text.py:TextArenaText"

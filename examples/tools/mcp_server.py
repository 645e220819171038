"""An MCP server over stdio that offers the calculator: what a server is, in one screen and without a library.

    .venv/bin/mindrlhf tools --names "mcp:.venv/bin/python examples/tools/mcp_server.py"

A server of your own will rather use the ``mcp`` package, or be one of the many that exist.
"""

import json
import sys
from typing import Any

from calculator import calculator

CALCULATOR = {
    "name": "calculator",
    "description": "Compute an arithmetic expression such as (3 + 4) * 2.",
    "inputSchema": {
        "type": "object",
        "properties": {"expression": {"type": "string"}},
        "required": ["expression"],
    },
}


def answer(method: str, parameters: dict[str, Any]) -> dict[str, Any]:
    """Return the result of one request."""
    if method == "initialize":
        information = {"name": "calculator", "version": "1"}
        return {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}, "serverInfo": information}
    if method == "tools/list":
        return {"tools": [CALCULATOR]}
    if method == "tools/call":
        try:
            text, is_error = str(calculator(str(parameters.get("arguments", {}).get("expression")))), False
        except ValueError as error:
            text, is_error = str(error), True
        return {"content": [{"type": "text", "text": text}], "isError": is_error}
    raise LookupError(method)


def main() -> None:
    """Answer requests, one a line, until the client closes our input."""
    for line in sys.stdin:
        request = json.loads(line)
        if "id" not in request:  # a notification
            continue
        reply = {"jsonrpc": "2.0", "id": request["id"]}
        try:
            reply["result"] = answer(request["method"], request.get("params", {}))
        except LookupError:
            reply["error"] = {"code": -32601, "message": "not supported"}
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main()

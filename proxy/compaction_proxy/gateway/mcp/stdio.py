"""The tools over stdin and stdout, by the official SDK; imported only by the command that does it."""

from mcp.server.stdio import stdio_server

from compaction_proxy.gateway.mcp.server import Call, server


async def run(call: Call) -> None:
    """Serve the client at stdin and stdout until it closes them.

    Args:
        call: Answers a call of the tool with this name and these arguments.
    """
    tools = server(call)
    async with stdio_server() as (read, write):
        await tools.run(read, write, tools.create_initialization_options())

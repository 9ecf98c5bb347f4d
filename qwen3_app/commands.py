"""The commands `qwen3`, `qwen3-fast`, `qwen3-embed` and `qwen3-batch` of the installed package."""
import sys

from qwen3_app.start import catch_ctrl_c, program


def main() -> int:
    """The command `qwen3`."""
    catch_ctrl_c()
    from qwen3_app import cli
    return cli.main()


def fast_main() -> int:
    """The command `qwen3-fast`."""
    catch_ctrl_c()
    try:
        import qwen3_numba
    except ImportError as error:  # numba is an extra that a plain installation leaves out
        print(f"{program()}: {error}", file=sys.stderr)
        return 1
    return qwen3_numba.main()


def embed_main() -> int:
    """The command `qwen3-embed`."""
    catch_ctrl_c()
    import qwen3_embed
    return qwen3_embed.main()


def batch_main() -> int:
    """The command `qwen3-batch`."""
    catch_ctrl_c()
    import qwen3_batch
    return qwen3_batch.main()

"""`ray-dcp devstore`: a local S3 server for people without a cloud, until Ctrl-C."""

from __future__ import annotations

import signal
import threading

import click

from ray_dcp.cli.output import told
from ray_dcp.testing.dev_store import DevStore


@click.command()
@click.argument("directory", type=click.Path(file_okay=False), required=False)
@click.option("--bucket", default="ckpt", show_default=True, help="The bucket that it makes.")
@click.option(
    "--port", type=click.IntRange(1, 65535), default=8333, show_default=True, help="Of the server."
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--key", help="Access key; a new one by default.")
@click.option("--secret", help="Secret key; a new one by default.")
def devstore(
    directory: str | None, bucket: str, port: int, host: str, key: str | None, secret: str | None
) -> None:
    """Run an S3 server on this machine that keeps its data in DIRECTORY, until Ctrl-C.

    Without DIRECTORY the data is removed at the end. For trying things out, not for data that
    matters: there is one copy, on this machine. Prints what other processes need to reach it.
    """
    store = DevStore(directory, bucket=bucket, port=port, host=host, key=key, secret=secret)
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    with store:
        needed = {
            "AWS_ENDPOINT_URL": store.endpoint,
            "AWS_ACCESS_KEY_ID": store.access_key_id,
            "AWS_SECRET_ACCESS_KEY": store.secret_access_key,
            "AWS_REGION": "us-east-1",
        }
        exports = [f"export {name}={value}" for name, value in needed.items()]
        example = f"# then: ray_dcp.save(state, checkpoint_id='s3://{bucket}/run/step-1')"
        told(needed, *exports, example, "# Ctrl-C ends it")
        stop.wait()

"""Clients of servers, made from addresses: the one place that knows credentials and time-outs.

Buckets are read by obstore, which reads ranges fastest and with the least work for this process;
web servers and the hub by the HTTP client that the hub's own library uses, since obstore does not
tell what `Retry-After` says, nor what a server answers that knows no ranges. From a server on the
same machine, eight requests at a time on 2 cores: 1 MiB each 1.96 GB/s by obstore, 0.74 by httpx,
1.26 by fsspec; 64 KiB each 0.32, 0.10 and 0.14; CPU 0.45, 1.5 and 0.8 seconds per GB at 1 MiB.
"""

from __future__ import annotations

import logging
import os
import threading
from datetime import timedelta
from functools import lru_cache
from http.cookiejar import CookieJar, DefaultCookiePolicy
from importlib import import_module
from typing import Any

from mergepipe_pipeline.errors import RemoteError, not_installed
from mergepipe_pipeline.remote.address import Address
from mergepipe_pipeline.remote.listing import first_line
from mergepipe_pipeline.remote.redirects import guarded
from mergepipe_pipeline.secrets import discreet

#: Seconds without a byte after which a request counts as failed.
TIMEOUT_S = 30.0
_ONE_AT_A_TIME = threading.Lock()
#: Requests under way at once, of all sources of this process.
IN_FLIGHT = 12


def need(module: str) -> Any:
    """An imported module of the extra `remote`. Raises RemoteError with how to install it."""
    try:
        return import_module(module)
    except ImportError as error:
        what = "Addresses need packages that are not installed"
        or_else = ", or download the model and give its folder"
        raise not_installed(what, "remote", error, or_else, RemoteError, module) from error


@lru_cache(maxsize=64)
def bucket_store(
    address: Address,
    *,
    max_retries: int = 10,
    timeout_s: float | None = None,
    writing: bool = False,
) -> Any:
    """The obstore store of a bucket's prefix: keys are relative to the address.

    With `writing`, S3 gets the SHA-256 of what it is sent, and refuses other bytes.

    Credentials are those of the usual environment variables (AWS_…, GOOGLE_…, AZURE_…). Raises
    RemoteError.
    """
    from_url = need("obstore.store").from_url
    options: dict[str, Any] = {
        "timeout": timedelta(seconds=timeout_s or 4 * TIMEOUT_S),
        "connect_timeout": timedelta(seconds=min(10.0, timeout_s or TIMEOUT_S)),
        # Said by the endpoint itself, as of a server in one's own house.
        "allow_http": _endpoint(address.scheme).startswith("http://"),
    }
    patience = timedelta(seconds=timeout_s) if timeout_s else timedelta(minutes=3)
    retry = {"max_retries": max_retries, "retry_timeout": patience}
    sums = {"checksum_algorithm": "SHA256"} if writing and address.scheme == "s3" else {}
    try:
        return from_url(address.text, client_options=options, retry_config=retry, **sums)
    except Exception as error:
        raise RemoteError(
            "A bucket cannot be reached as it is configured",
            where=address.text,
            found=first_line(error),
            next_step="check the address and the environment variables of its credentials",
        ) from error


def bucket_origin(address: Address) -> str:
    """The server that an address of a bucket means here, and whose buckets they are."""
    account = os.environ.get("AZURE_STORAGE_ACCOUNT_NAME", "") if address.scheme == "az" else ""
    return f"{_endpoint(address.scheme).rstrip('/')} {account}".strip()


def _endpoint(scheme: str) -> str:
    names = {"s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")}
    named = names.get(scheme, ("AZURE_STORAGE_ENDPOINT", "GOOGLE_BASE_URL"))
    return next((os.environ[n] for n in named if os.environ.get(n)), "")


def hub_api() -> Any:
    """The client of the hub: token, endpoint and offline mode are as huggingface_hub has them."""
    hub_session()  # which the client uses
    return need("huggingface_hub").HfApi(endpoint=hub_endpoint())


def hub_endpoint() -> str | None:
    """The hub's address, if the environment says another one; the library reads it once only."""
    return os.environ.get("HF_ENDPOINT", "").rstrip("/") or None


def hub_origin() -> str:
    """The hub that is asked."""
    return hub_endpoint() or str(need("huggingface_hub").constants.ENDPOINT)


def hub_session() -> Any:
    """The HTTP client that huggingface_hub shares, with what its user configured.

    It follows redirects as `redirects` permits, and what it logs holds no secrets of addresses.
    """
    hub = need("huggingface_hub")
    logger = logging.getLogger("huggingface_hub")
    for handler in logger.handlers:
        if not any(isinstance(known, _Discreet) for known in handler.filters):
            handler.addFilter(_Discreet())
    return guarded(hub.get_session(), hub_origin())


class _Discreet(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        """Let the record pass without what its addresses hold of passwords and signatures."""
        record.msg, record.args = discreet(record.getMessage()), ()
        return True


def web_client() -> Any:
    """An HTTP client for plain web servers; proxies and certificates by the environment."""
    with _ONE_AT_A_TIME:  # threads that ask at once get the same one
        return _web_client()


@lru_cache(maxsize=1)
def _web_client() -> Any:
    http = http_library()
    limits = http.Limits(max_connections=4 * IN_FLIGHT, max_keepalive_connections=IN_FLIGHT)
    no_cookies = CookieJar(DefaultCookiePolicy(allowed_domains=[]))
    return http.Client(follow_redirects=False, limits=limits, cookies=no_cookies)


def http_library() -> Any:
    """The HTTP library that huggingface_hub uses, whichever its version takes."""
    library = type(hub_session()).__module__.partition(".")[0]
    logging.getLogger(library).setLevel(logging.WARNING)  # else it tells every URL, signed ones too
    return need(library)

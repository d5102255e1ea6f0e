"""Split learning over an encrypted link: the data never leave their owner.

    telegrad run -n 2 examples/split_learning_tls.py

The `hospital` has the data and the first layers, the `company` the rest of the model. What travels
are activations and their gradients, over TLS: each side shows a certificate, and believes only
those that their common authority has signed.

Certificates are made at the start, with the `openssl` tool; worker 0 plays the authority. As in
real life each side keeps its private key to itself, and sends a request to be signed. If you have
certificates already, `RpcOptions(tls=TlsOptions(...))` is all you need.
"""

import os
import subprocess
import tempfile

import torch
from torch import nn

import telegrad.autograd as dist_autograd
import telegrad.rpc as rpc
from telegrad.optim import DistributedOptimizer
from telegrad.rpc import RpcOptions, TlsOptions

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
NAME = ["hospital", "company"][RANK]
KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


def certificates(store, directory):
    """Makes a key here, and has it signed by the authority. Returns what `init_rpc` needs."""

    def openssl(*arguments):
        subprocess.run(["openssl", *arguments], cwd=directory, check=True, capture_output=True)

    def path(file):
        return os.path.join(directory, file)

    def read(file):
        with open(path(file)) as opened:
            return opened.read()

    def write(file, text):
        with open(path(file), "w") as opened:
            opened.write(text)

    openssl("req", *KEY, "-keyout", "me.key", "-out", "me.csr", "-subj", f"/CN={NAME}")
    store.set(f"request/{RANK}", read("me.csr"))
    if RANK == 0:
        openssl("req", "-x509", *KEY, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=ca")
        store.set("authority", read("ca.pem"))
        # Workers are reached by address, so that is what certificates must name.
        write("address", "subjectAltName=IP:127.0.0.1")
        for rank in range(SIZE):
            write("in.csr", store.get(f"request/{rank}").decode())
            sign = ("x509", "-req", "-in", "in.csr", "-out", "out.pem", "-extfile", "address")
            openssl(*sign, "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "1")
            store.set(f"certificate/{rank}", read("out.pem"))
    write("ca.pem", store.get("authority").decode())
    write("me.pem", store.get(f"certificate/{RANK}").decode())
    return TlsOptions(certificate=path("me.pem"), key=path("me.key"), authority=path("ca.pem"))


torch.manual_seed(1)
company_model = nn.Sequential(nn.ReLU(), nn.Linear(16, 2))  # only the company's is used


def classify(hidden):
    return company_model(hidden)


def company_parameters():
    return [rpc.RRef(parameter) for parameter in company_model.parameters()]


def train():
    torch.manual_seed(0)
    patients, diagnosis = torch.randn(128, 8), torch.arange(128) % 2
    patients[diagnosis == 1] += 1.0
    model = nn.Linear(8, 16)  # stays here, as the data do
    parameters = [rpc.RRef(parameter) for parameter in model.parameters()]
    parameters += rpc.rpc_sync("company", company_parameters)
    optimizer = DistributedOptimizer(torch.optim.SGD, parameters, lr=0.5)
    for _ in range(40):
        with dist_autograd.context() as context_id:
            scores = rpc.rpc_sync("company", classify, args=(model(patients),))
            loss = nn.functional.cross_entropy(scores, diagnosis)
            dist_autograd.backward(context_id, [loss])
            optimizer.step(context_id)
    return (scores.argmax(dim=1) == diagnosis).float().mean().item()


with tempfile.TemporaryDirectory() as directory:
    store, _, _ = next(torch.distributed.rendezvous("env://"))  # where the workers meet anyway
    options = RpcOptions(transport="tcp", tls=certificates(store, directory))
    rpc.init_rpc(NAME, rank=RANK, world_size=SIZE, rpc_backend_options=options, store=store)
    if RANK == 0:
        accuracy = train()
        print(f"{accuracy:.0%} of the diagnoses are right after 40 steps over TLS")
        if accuracy < 0.85:
            raise SystemExit("nothing was learned")
        print("ok")
    rpc.shutdown()

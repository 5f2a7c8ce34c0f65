"""The tutorial's script (docs/tutorial.md): 36 clients with a few dozen digits each, every scanner
turned its own way, and what a model of one's own is worth to each of them.

run: python examples/tutorial.py              pictures need fedbcd[report]
"""

# 1. data: for each client what it trains on, and what it is tested on
import torch
from torch import nn

import fedbcd as fb

digits = fb.load_dataset("digits")  # 1,797 handwritten digits, 8 x 8, shipped with the package
x = torch.cat([digits.train.inputs, digits.test.inputs]).float() / 16
y = torch.cat([digits.train.targets, digits.test.targets])
split = fb.Dirichlet(alpha=1.0).split(y, devices=40, seed=1)  # uneven, no digit on two clients

clients = []
for number, own in enumerate(split.samples):
    order = torch.randperm(len(own), generator=torch.Generator().manual_seed(number))
    turned = torch.rot90(x[own], number % 4, dims=(1, 2))[order]
    labels, cut = y[own][order], len(own) * 3 // 4
    clients.append(((turned[:cut], labels[:cut]), (turned[cut:], labels[cut:])))
known, newcomers = clients[:36], clients[36:]


# 2. the federation: who has which data, which model, which loss
def model():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))


federation = fb.Federation(model, nn.functional.cross_entropy, devices=known, servers=4)

# 3. training, and the table of what was measured
method = fb.FedBCDI(device_step=0.1, penalty=0.1, batch=16)
run = fb.train(federation, method, until_clock=600, looks=6, seed=0)
last = run.history.last
print(f"{last.round} rounds: z {last.global_accuracy:.2f}, own {last.personal_accuracy:.2f}")

# 4. is it worth it? the same clients alone, and with one model for all
alone = fb.train(federation, fb.Local(device_step=0.1, batch=16), until_clock=600, looks=6)
fedavg = fb.train(federation, fb.FedAvg(device_step=0.4, batch=16), until_clock=600, looks=6)
for title, other in (("alone", alone), ("FedAvg", fedavg)):
    lose = sum(run.personal_scores[i] < other.personal_scores[i] for i in range(36))
    accuracy = other.history.last.personal_accuracy
    print(f"{title} {accuracy:.2f}; {lose} of 36 clients lose by FedBCD-I")

# 5. nobody waits for the slowest: servers mix when two of the four are there
asynchronous = fb.train(federation, method, cloud="async", until_clock=600, looks=6, seed=0)
last = asynchronous.history.last
print(f"async, {last.round} rounds: z {last.global_accuracy:.2f}, own {last.personal_accuracy:.2f}")

# 6. a client that comes later starts from z
mine, held_out = newcomers[0]
newcomer = fb.personalise(asynchronous, mine, test=held_out, steps=50)
print(newcomer.sentence)

# 7. keep it, take it up again, use a model
asynchronous.save("tutorial")
again = fb.Run.load("tutorial", federation)
print("client 17 reads", again.personal_model(17)(known[17][1][0][:5]).argmax(1).tolist())

# 8. pictures
import matplotlib.pyplot as plt  # noqa: E402  here, since only pictures need it

figure, (left, right) = plt.subplots(1, 2, figsize=(9, 4), layout="tight")
left.scatter(run.global_scores.values(), run.personal_scores.values())
left.plot([0, 1], [0, 1], color="grey", linewidth=1)
left.set(xlabel="accuracy of its server's model", ylabel="accuracy of its own", title="clients")
for title, shown in (("sync", run), ("async", asynchronous), ("alone", alone)):
    table = shown.history
    right.plot(table.column("clock"), table.column("personal_accuracy"), label=title)
right.set(xlabel="clock", title="personal accuracy")
right.legend()
figure.savefig("tutorial.png", dpi=110)

"""Actors on other workers play; one agent chooses their moves and learns.

    telegrad run -n 3 examples/reinforcement_learning.py

Worker 0 is the agent and owns the policy. Every other worker is an actor with a game of its own.
The agent tells all actors to play; each asks the agent, by a call back through an RRef, for every
move. Calls may go both ways at once: no order of them can deadlock.
"""

import os
import random
import threading

import torch
from torch import nn

import telegrad.rpc as rpc

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
ROUNDS, GAMES = 40, 4  # each actor plays that many games in a round


class Corridor:
    """Nine cells, a start in the middle. The right end is worth 1; the left end is a pit. A move
    costs a little, and now and then one slips and goes the other way."""

    LENGTH = 9

    def __init__(self, seed):
        self.random = random.Random(seed)

    def reset(self):
        self.position = self.LENGTH // 2
        return self.position

    def step(self, action):
        """Returns the new position, the reward, and whether the game is over."""
        slips = self.random.random() < 0.1
        self.position += 1 if (action == 1) != slips else -1
        if self.position == self.LENGTH - 1:
            return self.position, 1.0, True
        return self.position, -0.02, self.position == 0


class Actor:
    """Lives on a worker of its own."""

    def __init__(self, number):
        self.number = number
        self.game = Corridor(seed=number)

    def play(self, agent):
        """Plays some games; returns the reward of each."""
        rewards = []
        for game in range(GAMES):
            position, total, is_over = self.game.reset(), 0.0, False
            while not is_over:
                action = agent.rpc_sync().choose((self.number, game), position)
                position, reward, is_over = self.game.step(action)
                total += reward
            rewards.append(total)
        return rewards


class Agent:
    """Learns by REINFORCE: what was chosen in games that went well becomes more likely."""

    def __init__(self):
        torch.manual_seed(0)
        self.policy = nn.Linear(Corridor.LENGTH, 2)
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=0.1)
        self.lock = threading.Lock()  # actors ask at the same time
        self.choices = {}  # (actor, game) -> log probabilities of the chosen moves

    def choose(self, game, position):
        with self.lock:
            state = nn.functional.one_hot(torch.tensor(position), Corridor.LENGTH).float()
            moves = torch.distributions.Categorical(logits=self.policy(state))
            move = moves.sample()
            self.choices.setdefault(game, []).append(moves.log_prob(move))
            return move.item()

    def learn(self, rewards):
        average = sum(rewards.values()) / len(rewards)
        terms = [-(rewards[g] - average) * torch.stack(c).sum() for g, c in self.choices.items()]
        self.optimizer.zero_grad()
        torch.stack(terms).mean().backward()
        self.optimizer.step()
        self.choices.clear()
        return average


rpc.init_rpc("agent" if RANK == 0 else f"actor{RANK}")
if RANK == 0:
    agent = Agent()
    me = rpc.RRef(agent)
    actors = {n: rpc.remote(f"actor{n}", Actor, args=(n,)) for n in range(1, SIZE)}
    averages = []
    for _ in range(ROUNDS):
        playing = {n: actor.rpc_async().play(me) for n, actor in actors.items()}
        rewards = {(n, i): r for n, f in playing.items() for i, r in enumerate(f.wait())}
        averages.append(agent.learn(rewards))
    before, after = sum(averages[:5]) / 5, sum(averages[-5:]) / 5
    print(f"average reward rose from {before:.2f} to {after:.2f} in {ROUNDS} rounds")
    if not after > before + 0.2:
        raise SystemExit("the agent did not learn")
    print(f"ok: {len(actors)} actors")
rpc.shutdown()

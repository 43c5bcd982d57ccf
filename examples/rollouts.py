"""A trainer, and a rollout process that follows it: reinforcement learning with weights that are a little old.

Replicas train a policy on rollouts, which they read from a folder. A process that is no member of the job writes them:
it plays with the newest committed weights, which `ftopt.follow` reads from the job's checkpoints. Neither waits for the
other. Start both, in any order, with ``FOLDER`` new or empty::

    STEP_S=0.6 FOLDER=runs/bandit ftopt launch -n 2 examples/rollouts.py
    STEP_S=0.6 FOLDER=runs/bandit python examples/rollouts.py roll

Kill a replica with ``kill -9``, or all: the rollouts go on with the weights that are there. The rollout process ends
when it has seen the job's last step.
"""

from __future__ import annotations

import os
import random
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tiny import STEP_S, STEPS, SYNC_EVERY
from torch import Tensor, nn
from torch.distributions import Categorical

import ftopt

FOLDER = Path(os.environ.get("FOLDER", "runs/bandit"))
ACTIONS, STATE, FILES = 4, 8, 16


def policy() -> nn.Module:
    """Logits of the actions in a state; the same at first in each process."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(STATE, 64), nn.Tanh(), nn.Linear(64, ACTIONS))


def rewards(states: Tensor, actions: Tensor) -> Tensor:
    """The game: 1 for the action that points to the largest of the state's first numbers."""
    return (states[:, :ACTIONS].argmax(1) == actions).float()


def roll() -> float:
    """The rollout process: plays with the newest weights until the job has ended; returns the last mean reward."""
    (FOLDER / "rollouts").mkdir(parents=True, exist_ok=True)
    model, follower = policy(), ftopt.follow(FOLDER / "checkpoints")
    step, game, mean = 0, 0, 0.0
    while step < STEPS:
        if (weights := follower.newer()) is not None:  # does not wait
            model.load_state_dict(weights.state_dict)
            step = weights.inner_step
            print(f"version {weights.version}, step {step}: mean reward {mean:.2f}", flush=True)
        states = torch.randn(256, STATE)
        with torch.no_grad():
            choice = Categorical(logits=model(states))
            actions = choice.sample()
        played = {"states": states, "actions": actions, "rewards": rewards(states, actions)}
        played["log_probs"] = choice.log_prob(actions)
        draft = FOLDER / "rollouts" / "draft"
        save_file(played, draft)
        draft.replace(FOLDER / "rollouts" / f"{game % FILES}.safetensors")  # whole, or not there; the oldest goes
        game, mean = game + 1, 0.9 * mean + 0.1 * float(played["rewards"].mean())
        time.sleep(STEP_S)
    return mean


def main() -> tuple[int, str, float]:
    """Trains one replica; returns the job's inner step, the digest of the global parameters, and their mean reward."""
    model = policy()
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    optimizer = ftopt.wrap(inner, model, ftopt.DiLoCo(sync_every=SYNC_EVERY), leave_on_signals=True)
    checkpoints = ftopt.Checkpoints(FOLDER / "checkpoints", optimizer, every=1)
    checkpoints.resume()
    draw = random.Random(optimizer.seed)  # each replica reads other rollouts
    with optimizer:
        for _ in optimizer.steps(STEPS):  # of the job
            with optimizer.busy("waiting for rollouts"):  # the live page shows it
                while not (files := list((FOLDER / "rollouts").glob("*.safetensors"))):
                    time.sleep(0.1)
            played = load_file(draw.choice(files))
            log_probs = Categorical(logits=model(played["states"])).log_prob(played["actions"])
            ratio = (log_probs - played["log_probs"]).exp().clamp(max=2.0)  # the rollouts' weights are older
            advantage = played["rewards"] - played["rewards"].mean()
            loss = -(ratio * advantage).mean()
            loss.backward()
            optimizer.step(loss=loss.detach())
            optimizer.zero_grad()
            checkpoints.step()
            print(f"{optimizer.replica}: step {optimizer.inner_step}", flush=True)
            time.sleep(STEP_S)
        checkpoints.close()
    states = torch.randn(2_000, STATE, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return (
            optimizer.status.committed_step,
            optimizer.digest(),
            float(rewards(states, model(states).argmax(1)).mean()),
        )


if __name__ == "__main__":
    if sys.argv[1:] == ["roll"]:
        print(f"mean reward {roll():.2f}")
    else:
        print("step {}, digest {:.12}, mean reward {:.2f}".format(*main()))

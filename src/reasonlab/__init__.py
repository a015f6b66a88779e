"""A laboratory for reasoning models.

It trains them by supervised fine-tuning and reinforcement learning, trains the judges that grade them, and
shows what happened: accuracy and thinking length, always together, always with error bars. Importing this
package loads nothing heavy; torch is imported by the rooms that need it.
"""

__version__ = "0.1.0"

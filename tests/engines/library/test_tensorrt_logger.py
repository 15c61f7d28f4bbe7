"""The logger that gives TensorRT's reason for a failed call."""

from __future__ import annotations

import pytest

from engines.library.tensorrt_logger import LONGEST_REASON, create_logger
from tests.support.doubles.cuda_double import ILogger


class Module:
    """The part of a TensorRT module that a logger needs."""

    ILogger = ILogger


@pytest.fixture
def logger():
    return create_logger(Module)


def test_the_reason_is_the_first_error_because_it_causes_the_later_ones(logger):
    logger.log(ILogger.ERROR, "the cause\nwith details")
    logger.log(ILogger.ERROR, "a consequence")
    assert logger.reason() == "the cause"


def test_a_reason_is_given_once(logger):
    logger.log(ILogger.ERROR, "of the first call")
    logger.reason()
    logger.log(ILogger.ERROR, "of the second call")
    assert logger.reason() == "of the second call"


def test_without_an_error_there_is_no_reason_and_warnings_are_none(logger):
    logger.log(ILogger.WARNING, "slow")
    assert (logger.reason(), logger.warnings) == ("no reason given", ["slow"])


def test_a_long_reason_is_cut(logger):
    logger.log(ILogger.ERROR, "x" * 1000)
    assert logger.reason() == "x" * LONGEST_REASON

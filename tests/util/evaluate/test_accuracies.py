from util.evaluate.results import accuracies


def test_top_5_counts_from_six_classes_on():
    assert accuracies(50, 100, 5) == {"top1": 50}
    assert accuracies(50, 90, 6) == {"top1": 50, "top5": 90}

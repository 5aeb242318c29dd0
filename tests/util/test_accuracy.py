from util.accuracy import accuracies, accuracy_text


def test_top_5_counts_from_six_classes_on():
    assert accuracies(50, 100, 5) == {"top1": 50}
    assert accuracies(50, 90, 6) == {"top1": 50, "top5": 90}


def test_the_text_names_what_there_is():
    assert accuracy_text({"val_top1": 81.5, "val_top5": 95.25}, prefix="val_") == "top-1 81.50 %, top-5 95.25 %"
    assert accuracy_text({"top1": 81.5}, digits=3) == "top-1 81.500 %"

"""Estimators and pipelines of scikit-learn: what is fitted, on what, and what of it is compared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Final

import numpy as np


class Sk:
    """An estimator to be made: a class of scikit-learn by its path, and arguments, estimators among them."""

    def __init__(self, path: str, *args: Any, **kwargs: Any) -> None:
        self.module, self.name = path.rsplit(".", 1)
        self.args, self.kwargs = args, kwargs

    def make(self) -> Any:
        kind = getattr(import_module(f"sklearn.{self.module}"), self.name)
        return kind(*_made(self.args), **{k: _made(v) for k, v in self.kwargs.items()})


def _made(value: Any) -> Any:
    if isinstance(value, Sk):
        return value.make()
    return type(value)(map(_made, value)) if isinstance(value, list | tuple) else value


@dataclass(frozen=True)
class Spec:
    """A line of the tables below.

    Attributes:
        estimator: what is fitted.
        data: which of the data sets of ``classic._data``.
        methods: of the fitted estimator, whose results are the outputs.
        name: the estimator's when "".
        dtype: of the input.
        options: of skl2onnx for the estimator.
        known: as of a Case.
    """

    estimator: Sk
    data: str = "classes"
    methods: tuple[str, ...] = ("predict", "predict_proba")
    name: str = ""
    dtype: type = np.float32
    options: Mapping[str, Any] = field(default_factory=dict)
    known: Mapping[str, str] = field(default_factory=dict)

    @property
    def title(self) -> str:
        return self.name or self.estimator.name


LABEL = ("predict",)
CHANGE = ("transform",)
SCORE = ("predict", "decision_function")
TREE = {"max_depth": 4, "random_state": 0}
FEW = {"n_estimators": 5, **TREE}
LOGISTIC = Sk("linear_model.LogisticRegression")
RIDGE = Sk("linear_model.Ridge")
CLASS_TREE, NUMBER_TREE = Sk("tree.DecisionTreeClassifier", **TREE), Sk("tree.DecisionTreeRegressor", **TREE)
SCALER = Sk("preprocessing.StandardScaler")
RAW = {"zipmap": False, "raw_scores": True}
SHAPED = {"outputs": "skl2onnx gives the labels another shape, in onnxruntime too"}
ALIKE = {"outputs": "skl2onnx weighs all neighbours alike: by 1 / Max(-distance, 1e-6)"}

CLASSIFIERS = (
    Spec(LOGISTIC),
    Spec(LOGISTIC, "two", name="LogisticRegression, two classes"),
    Spec(LOGISTIC, "named", name="LogisticRegression, names as labels"),
    Spec(LOGISTIC, "two", name="LogisticRegression, float64", dtype=np.float64),
    Spec(LOGISTIC, methods=("predict", "decision_function"), name="LogisticRegression, raw scores", options=RAW),
    Spec(Sk("linear_model.SGDClassifier", loss="log_loss", random_state=0)),
    Spec(Sk("linear_model.Perceptron"), methods=SCORE, options=RAW),
    Spec(CLASS_TREE),
    Spec(CLASS_TREE, "named", name="DecisionTreeClassifier, names as labels"),
    Spec(
        CLASS_TREE,
        "flags",
        name="DecisionTreeClassifier, several outputs",
        known={"outputs": "skl2onnx writes a Cast of the probabilities to booleans"},
    ),
    Spec(Sk("ensemble.RandomForestClassifier", **FEW)),
    Spec(Sk("ensemble.RandomForestClassifier", **FEW), "two", name="RandomForestClassifier, float64", dtype=np.float64),
    Spec(Sk("ensemble.ExtraTreesClassifier", **FEW)),
    Spec(Sk("ensemble.GradientBoostingClassifier", **FEW)),
    Spec(Sk("ensemble.GradientBoostingClassifier", **FEW), "two", name="GradientBoostingClassifier, two classes"),
    Spec(Sk("ensemble.HistGradientBoostingClassifier", max_iter=5)),
    Spec(
        Sk("ensemble.HistGradientBoostingClassifier", max_iter=5), "holes", name="HistGradientBoostingClassifier, NaN"
    ),
    Spec(Sk("ensemble.AdaBoostClassifier", CLASS_TREE, n_estimators=4)),
    Spec(Sk("ensemble.BaggingClassifier", LOGISTIC, n_estimators=3, max_features=0.6, random_state=0)),
    Spec(Sk("ensemble.VotingClassifier", [("a", LOGISTIC), ("b", CLASS_TREE)], voting="soft", flatten_transform=False)),
    Spec(
        Sk(
            "ensemble.VotingClassifier",
            [("a", LOGISTIC), ("b", CLASS_TREE), ("c", Sk("naive_bayes.GaussianNB"))],
            flatten_transform=False,
        ),
        methods=(),
        name="VotingClassifier, hard",
    ),
    Spec(Sk("ensemble.StackingClassifier", [("a", LOGISTIC), ("b", CLASS_TREE)], LOGISTIC, cv=3)),
    Spec(Sk("svm.SVC", probability=True, random_state=0)),
    Spec(Sk("svm.SVC", kernel="poly", degree=2), methods=SCORE, name="SVC, polynomial", options=RAW),
    Spec(Sk("svm.SVC", kernel="linear", probability=True, random_state=0), "two", name="SVC, linear, two classes"),
    Spec(Sk("svm.NuSVC", nu=0.3, probability=True, random_state=0)),
    Spec(Sk("svm.LinearSVC"), methods=SCORE),
    Spec(Sk("neighbors.KNeighborsClassifier", 5)),
    Spec(
        Sk("neighbors.KNeighborsClassifier", 5, weights="distance", metric="manhattan"),
        name="KNeighborsClassifier, Manhattan",
        known=ALIKE,
    ),
    Spec(Sk("neighbors.RadiusNeighborsClassifier", 4.0)),
    Spec(Sk("naive_bayes.GaussianNB")),
    Spec(Sk("naive_bayes.BernoulliNB")),
    Spec(Sk("naive_bayes.MultinomialNB"), "counts"),
    Spec(Sk("naive_bayes.ComplementNB"), "counts"),
    Spec(Sk("naive_bayes.CategoricalNB", min_categories=20), "counts"),
    Spec(Sk("discriminant_analysis.LinearDiscriminantAnalysis")),
    Spec(Sk("discriminant_analysis.QuadraticDiscriminantAnalysis"), known=SHAPED),
    Spec(Sk("neural_network.MLPClassifier", hidden_layer_sizes=(8,), random_state=0, max_iter=50)),
    Spec(Sk("calibration.CalibratedClassifierCV", Sk("svm.LinearSVC"), cv=2)),
    Spec(
        Sk("calibration.CalibratedClassifierCV", CLASS_TREE, method="isotonic", cv=2),
        name="CalibratedClassifierCV, isotonic",
    ),
    Spec(Sk("multiclass.OneVsRestClassifier", LOGISTIC)),
    Spec(Sk("multiclass.OneVsOneClassifier", LOGISTIC), methods=SCORE, options={"zipmap": False}, known=SHAPED),
    Spec(Sk("multioutput.MultiOutputClassifier", LOGISTIC), "flags"),
)
REGRESSORS = (
    Sk("linear_model.LinearRegression"),
    Sk("linear_model.Lasso", 0.1),
    Sk("linear_model.BayesianRidge"),
    Sk("linear_model.HuberRegressor"),
    Sk("linear_model.RANSACRegressor", random_state=0),
    NUMBER_TREE,
    Sk("ensemble.RandomForestRegressor", **FEW),
    Sk("ensemble.ExtraTreesRegressor", **FEW),
    Sk("ensemble.GradientBoostingRegressor", **FEW),
    Sk("ensemble.HistGradientBoostingRegressor", max_iter=5),
    Sk("ensemble.AdaBoostRegressor", NUMBER_TREE, n_estimators=4, random_state=0),
    Sk("ensemble.BaggingRegressor", RIDGE, n_estimators=3, max_features=0.6, random_state=0),
    Sk("ensemble.VotingRegressor", [("a", RIDGE), ("b", NUMBER_TREE)]),
    Sk("ensemble.StackingRegressor", [("a", RIDGE), ("b", NUMBER_TREE)], RIDGE, cv=3),
    Sk("svm.SVR"),
    Sk("svm.NuSVR", kernel="sigmoid"),
    Sk("svm.LinearSVR"),
    Sk("neighbors.KNeighborsRegressor", 4),
    Sk("gaussian_process.GaussianProcessRegressor", alpha=1.0, random_state=0),
    Sk("neural_network.MLPRegressor", hidden_layer_sizes=(8,), activation="tanh", random_state=0, max_iter=50),
)
OTHER_REGRESSORS = (
    Spec(
        Sk("neighbors.KNeighborsRegressor", 4, weights="distance"),
        "numbers",
        LABEL,
        name="KNeighborsRegressor, by distance",
        known=ALIKE,
    ),
    Spec(
        Sk("neighbors.KNeighborsRegressor", 4),
        "numbers",
        LABEL,
        name="KNeighborsRegressor, CDist",
        options={"optim": "cdist"},
    ),
    Spec(Sk("linear_model.PoissonRegressor"), "positive", LABEL),
    Spec(Sk("linear_model.TweedieRegressor", power=1.5), "positive", LABEL),
    Spec(NUMBER_TREE, "pairs", LABEL, name="DecisionTreeRegressor, several outputs"),
    Spec(Sk("multioutput.MultiOutputRegressor", Sk("svm.SVR")), "pairs", LABEL),
    Spec(Sk("cross_decomposition.PLSRegression"), "pairs", LABEL),
)
CHAIN = Sk("pipeline.Pipeline", [("a", SCALER), ("b", Sk("decomposition.PCA", 3)), ("c", LOGISTIC)])
WORDS = Sk("feature_extraction.text.TfidfVectorizer", lowercase=False)
PIPELINES = (
    Spec(CHAIN, name="Pipeline, scaler, PCA, LogisticRegression"),
    Spec(Sk("pipeline.Pipeline", [("a", WORDS), ("b", LOGISTIC)]), "texts", name="Pipeline, words, LogisticRegression"),
    Spec(Sk("model_selection.GridSearchCV", Sk("svm.SVR"), {"C": [0.5, 1.0]}, cv=2), "numbers", LABEL),
)
UNSUPERVISED = (
    Spec(Sk("mixture.GaussianMixture", 3, random_state=0)),
    Spec(Sk("mixture.BayesianGaussianMixture", n_components=3, random_state=0, covariance_type="diag")),
    Spec(Sk("cluster.KMeans", 3, n_init=1, random_state=0), methods=("predict", "transform")),
    Spec(Sk("cluster.MiniBatchKMeans", 3, n_init=1, random_state=0), methods=("predict", "transform")),
    Spec(Sk("ensemble.IsolationForest", n_estimators=5, random_state=0), methods=SCORE),
    Spec(Sk("neighbors.LocalOutlierFactor", 5, novelty=True), methods=SCORE),
    Spec(Sk("svm.OneClassSVM"), methods=SCORE),
    Spec(Sk("linear_model.SGDOneClassSVM", random_state=0), methods=SCORE),
)
TRANSFORMERS = {
    "classes": (
        Sk("decomposition.PCA", 3, whiten=True),
        Sk("decomposition.IncrementalPCA", 3),
        Sk("decomposition.KernelPCA", 3, kernel="rbf"),
        Sk("decomposition.TruncatedSVD", 3, random_state=0),
        SCALER,
        Sk("preprocessing.MinMaxScaler", clip=True),
        Sk("preprocessing.MaxAbsScaler"),
        Sk("preprocessing.RobustScaler"),
        Sk("preprocessing.Normalizer", "l1"),
        Sk("preprocessing.Binarizer"),
        Sk("preprocessing.PolynomialFeatures", 3),
        Sk("preprocessing.KBinsDiscretizer", 4, encode="onehot-dense", quantile_method="averaged_inverted_cdf"),
        Sk("random_projection.GaussianRandomProjection", 3, random_state=0),
        Sk("feature_selection.SelectKBest", k=2),
        Sk("feature_selection.RFE", RIDGE, n_features_to_select=2),
        Sk("feature_selection.SelectFromModel", RIDGE, threshold="median"),
        Sk("feature_selection.VarianceThreshold", 0.9),
        Sk("neighbors.NeighborhoodComponentsAnalysis", 2, random_state=0),
        Sk("pipeline.FeatureUnion", [("a", SCALER), ("b", Sk("decomposition.PCA", 2))]),
    ),
    "holes": (Sk("impute.SimpleImputer"), Sk("impute.KNNImputer", n_neighbors=3)),
    "categories": (
        Sk("preprocessing.OneHotEncoder"),
        Sk("preprocessing.OrdinalEncoder"),
        Sk("preprocessing.TargetEncoder", random_state=0),
    ),
    "texts": (
        Sk("feature_extraction.text.CountVectorizer", ngram_range=(1, 2)),
        Sk("feature_extraction.text.TfidfVectorizer"),
    ),
}
SLOPES = {
    "PowerTransformer": "skl2onnx takes powers of negative numbers and replaces the NaN: the derivative remains NaN",
    "QuantileTransformer": "skl2onnx divides by the difference of equal quantiles, then selects another value: NaN",
}
CHARACTERS = Sk("feature_extraction.text.TfidfVectorizer", analyzer="char", ngram_range=(2, 3), lowercase=False)
SPECS: Final = (
    Spec(CHARACTERS, "texts", CHANGE, "TfidfVectorizer, characters"),
    *PIPELINES,
    Spec(Sk("preprocessing.PowerTransformer"), methods=CHANGE, known={"grad": SLOPES["PowerTransformer"]}),
    Spec(
        Sk("preprocessing.QuantileTransformer", n_quantiles=20),
        methods=CHANGE,
        known={"grad": SLOPES["QuantileTransformer"]},
    ),
    *CLASSIFIERS,
    *(Spec(e, "numbers", LABEL) for e in REGRESSORS),
    *OTHER_REGRESSORS,
    *UNSUPERVISED,
    *(Spec(e, data, CHANGE) for data, estimators in TRANSFORMERS.items() for e in estimators),
)

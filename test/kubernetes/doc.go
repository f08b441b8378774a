// Package kubernetestest puts the manifests of deploy/k8s into a Kubernetes cluster, checks limits all the while its
// pods are restarted, added, removed, deleted and evicted, and judges every answer. It makes and removes a namespace of
// its own, and does nothing without -kubeconfig.
//
// It has to run where the pods' and Services' addresses are reached, such as on a node of the cluster: the Go client
// asks the pods themselves, by the headless Service's name.
//
// How long checks wait is printed, and judged only with -longest: it says something about Weir only where the machines
// have processors to spare.
package kubernetestest

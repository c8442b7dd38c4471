//go:build tools

// Package tools names the program that is built here, so that go.mod keeps what it needs: Multus, the CNI plugin that attaches a
// pod's further networks. A module of its own, because it needs another Kubernetes client than the cluster's programs.
package tools

import _ "gopkg.in/k8snetworkplumbingwg/multus-cni.v4/cmd/multus"

// Command lockstep-kube is every program of the embedded cluster in one file: the components share almost all of their code,
// so one binary of 150 MB replaces eight of 50 to 110 MB each, and one cached build replaces eight downloads.
//
// It is called by a component's name, through a link or as its first argument: lockstep-kube kubelet --config=...
package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	"github.com/coredns/coredns/coremain"
	"github.com/spf13/cobra"
	"go.etcd.io/etcd/server/v3/etcdmain"
	"k8s.io/component-base/cli"
	kubectl "k8s.io/kubectl/pkg/cmd"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	controllermanager "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	proxy "k8s.io/kubernetes/cmd/kube-proxy/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
	kubelet "k8s.io/kubernetes/cmd/kubelet/app"

	_ "github.com/coredns/coredns/core/plugin"
	_ "k8s.io/component-base/logs/json/register"
	_ "k8s.io/component-base/metrics/prometheus/clientgo"
	_ "k8s.io/component-base/metrics/prometheus/version"
)

const name = "lockstep-kube"

// Those that cobra runs. A function each, because making a command registers its flags and feature gates.
var components = map[string]func() *cobra.Command{
	"kube-apiserver":          apiserver.NewAPIServerCommand,
	"kube-controller-manager": controllermanager.NewControllerManagerCommand,
	"kube-proxy":              proxy.NewProxyCommand,
	"kube-scheduler":          func() *cobra.Command { return scheduler.NewSchedulerCommand() },
	"kubectl":                 kubectl.NewDefaultKubectlCommand,
	"kubelet":                 func() *cobra.Command { return kubelet.NewKubeletCommand(context.Background()) },
}

func main() {
	os.Args[0] = filepath.Base(os.Args[0])
	if os.Args[0] == name && len(os.Args) > 1 {
		os.Args = os.Args[1:]
	}
	component := os.Args[0]
	switch component {
	case "coredns":
		coremain.Run()
	case "etcd":
		etcdmain.Main(os.Args)
	default:
		command, known := components[component]
		if !known {
			fmt.Fprintf(os.Stderr, "%s: no component %q\n", name, component)
			os.Exit(2)
		}
		os.Exit(cli.Run(command()))
	}
}

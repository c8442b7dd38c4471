// Command openshift-kube is OpenShift's control plane in one program, from the packages that openshift/microshift vendors: openshift-kube kube-apiserver --openshift-config=...
// control_plane.py builds it as a command of that repository, without writing there.
package main

import (
	"fmt"
	"os"

	policy "github.com/openshift/cluster-policy-controller/pkg/cmd/cluster-policy-controller"
	"github.com/openshift/library-go/pkg/controller/controllercmd"
	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/component-base/cli"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	controllermanager "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
	"k8s.io/utils/clock"
)

const namespace = "openshift-kube-controller-manager"

// Those of quotas need the APIs of images and of ClusterResourceQuotas. kube-controller-manager keeps ResourceQuotas.
var controllers = []any{"*", "-openshift.io/resourcequota", "-openshift.io/cluster-quota-reconciliation"}

var components = map[string]func() *cobra.Command{
	"kube-apiserver":            apiserver.NewAPIServerCommand,
	"kube-controller-manager":   controllermanager.NewControllerManagerCommand,
	"kube-scheduler":            func() *cobra.Command { return scheduler.NewSchedulerCommand() },
	"cluster-policy-controller": policyController,
}

// policyController gives every namespace its range of user ids and its Pod Security labels, without the election, server and pod that it has in a cluster.
func policyController() *cobra.Command {
	var kubeconfig string
	command := &cobra.Command{Use: "cluster-policy-controller"}
	command.RunE = func(command *cobra.Command, _ []string) error {
		settings := &unstructured.Unstructured{Object: map[string]any{"controllers": controllers}}
		owner := &corev1.ObjectReference{APIVersion: "v1", Kind: "Namespace", Name: namespace, Namespace: namespace}
		return controllercmd.NewController(command.Use, policy.RunClusterPolicyController, clock.RealClock{}).
			WithKubeConfigFile(kubeconfig, nil).WithComponentNamespace(namespace).WithComponentOwnerReference(owner).
			Run(command.Context(), settings)
	}
	command.Flags().StringVar(&kubeconfig, "kubeconfig", "", "the administrator's")
	return command
}

func main() {
	component := ""
	if len(os.Args) > 1 {
		component = os.Args[1]
	}
	command, known := components[component]
	if !known {
		fmt.Fprintf(os.Stderr, "openshift-kube: no component %q\n", component)
		os.Exit(2)
	}
	os.Args = os.Args[1:]
	os.Exit(cli.Run(command()))
}

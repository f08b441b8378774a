package deploy

import (
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	policyv1 "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/intstr"
)

// lease is how long a grant lives at most, and so how long a voter that has just started abstains.
const lease = 3 * time.Second

// each runs a test on everything that has nodes in it.
func each(t *testing.T, test func(*testing.T, manifests)) {
	t.Helper()
	all := installations(t)
	for _, name := range slices.Sorted(maps.Keys(all)) {
		t.Run(name, func(t *testing.T) { test(t, all[name]) })
	}
}

func TestSelectors(t *testing.T) {
	each(t, func(t *testing.T, m manifests) {
		set := object[appsv1.StatefulSet](t, m, "weir")
		selectors := map[string]*metav1.LabelSelector{"StatefulSet": set.Spec.Selector}
		for i, c := range set.Spec.Template.Spec.TopologySpreadConstraints {
			selectors[fmt.Sprintf("topologySpreadConstraints[%d]", i)] = c.LabelSelector
		}
		for key, o := range m.typed {
			switch o := o.(type) {
			case *corev1.Service:
				selectors[key] = metav1.SetAsLabelSelector(o.Spec.Selector)
			case *policyv1.PodDisruptionBudget:
				selectors[key] = o.Spec.Selector
			case *networkingv1.NetworkPolicy:
				selectors[key] = &o.Spec.PodSelector
			}
		}
		for name, s := range selectors {
			sel, err := metav1.LabelSelectorAsSelector(s)
			expect(t, err == nil && !sel.Empty() && sel.Matches(labels.Set(set.Spec.Template.Labels)),
				"%s: the selector %q does not match the pods' labels %v (%v)", name, sel, set.Spec.Template.Labels, err)
		}
	})
}

// containerPorts returns the ports of the node's container by name.
func containerPorts(t *testing.T, m manifests) map[string]corev1.ContainerPort {
	t.Helper()
	ports := make(map[string]corev1.ContainerPort)
	for _, p := range m.node(t).Ports {
		_, twice := ports[p.Name]
		expect(t, !twice, "two ports are named %s", p.Name)
		ports[p.Name] = p
	}
	return ports
}

func TestServices(t *testing.T) {
	each(t, func(t *testing.T, m manifests) {
		container := containerPorts(t, m)
		served := make(map[string]bool)
		for key, o := range m.typed {
			service, ok := o.(*corev1.Service)
			if !ok {
				continue
			}
			for _, p := range service.Spec.Ports {
				target, ok := container[p.TargetPort.StrVal]
				expect(t, p.TargetPort.Type == intstr.String && ok && target.ContainerPort == p.Port &&
					protocol(target.Protocol) == protocol(p.Protocol), "%s: port %s leads to %+v", key, p.Name, target)
				served[p.TargetPort.StrVal] = true
			}
		}
		expect(t, len(served) == len(container), "Services serve %v of the container's ports %v",
			slices.Sorted(maps.Keys(served)), slices.Sorted(maps.Keys(container)))

		set, headless := object[appsv1.StatefulSet](t, m, "weir"), object[corev1.Service](t, m, "weir-headless")
		expect(t, set.Spec.ServiceName == headless.Name && headless.Spec.ClusterIP == corev1.ClusterIPNone,
			"serviceName is %q, the headless Service %q with clusterIP %q", set.Spec.ServiceName, headless.Name,
			headless.Spec.ClusterIP)
		expect(t, headless.Spec.PublishNotReadyAddresses, "nodes that are not ready cannot be found")
		clients := object[corev1.Service](t, m, "weir")
		expect(t, !clients.Spec.PublishNotReadyAddresses, "callers are sent to nodes that are not ready")
		expect(t, set.Spec.PodManagementPolicy == appsv1.ParallelPodManagement,
			"podManagementPolicy is %q", set.Spec.PodManagementPolicy)
	})
}

func protocol(p corev1.Protocol) corev1.Protocol {
	if p == "" {
		return corev1.ProtocolTCP
	}
	return p
}

func TestProbes(t *testing.T) {
	each(t, func(t *testing.T, m manifests) {
		c := m.node(t)
		scheme := corev1.URISchemeHTTP
		if podSettings(t, c)["tls-cert-file"] != "" {
			scheme = corev1.URISchemeHTTPS
		}
		for name, want := range map[string]struct {
			probe *corev1.Probe
			path  string
		}{
			"startup": {c.StartupProbe, "/healthz"}, "liveness": {c.LivenessProbe, "/healthz"},
			"readiness": {c.ReadinessProbe, "/readyz"},
		} {
			if want.probe == nil || want.probe.HTTPGet == nil {
				t.Errorf("there is no %s probe over HTTP", name)
				continue
			}
			get := want.probe.HTTPGet
			if get.Scheme == "" {
				get.Scheme = corev1.URISchemeHTTP // what the API server fills in
			}
			expect(t, get.Path == want.path && get.Port.StrVal == "http" && get.Scheme == scheme,
				"%s probe is %+v, want %s of port http by %s", name, get, want.path, scheme)
		}
	})
}

// A pod that ends has time for all it does, and the next one goes only when it votes again.
func TestDrain(t *testing.T) {
	each(t, func(t *testing.T, m manifests) {
		set, c := object[appsv1.StatefulSet](t, m, "weir"), m.node(t)
		grace, err := time.ParseDuration(podSettings(t, c)["grace"])
		noError(t, err)
		must(t, c.Lifecycle != nil && c.Lifecycle.PreStop != nil && c.Lifecycle.PreStop.Sleep != nil &&
			c.Lifecycle.PreStop.Sleep.Seconds >= 1,
			"preStop does not sleep: the image has nothing to run, and endpoints take a moment to go")
		sleep := time.Duration(c.Lifecycle.PreStop.Sleep.Seconds) * time.Second
		kill := set.Spec.Template.Spec.TerminationGracePeriodSeconds
		expect(t, kill != nil && time.Duration(*kill)*time.Second >= sleep+grace+5*time.Second,
			"terminationGracePeriodSeconds is %v, want preStop's %v, --grace's %v and 5 s to spare", kill, sleep, grace)
		ready := time.Duration(set.Spec.MinReadySeconds) * time.Second
		expect(t, ready >= lease, "minReadySeconds is %v, the lease %v", ready, lease)
		u := set.Spec.UpdateStrategy
		expect(t, u.Type == appsv1.RollingUpdateStatefulSetStrategyType && u.RollingUpdate == nil,
			"updates are %+v, want one pod at a time", u)
		budget := object[policyv1.PodDisruptionBudget](t, m, "weir").Spec
		expect(t, budget.MaxUnavailable != nil && budget.MaxUnavailable.IntValue() == 1 && budget.MinAvailable == nil &&
			budget.UnhealthyPodEvictionPolicy == nil, "the disruption budget is %+v, want one pod unavailable at most",
			budget)
	})
}

// Pods run under the Pod Security Standard "restricted", with nothing to write to and no rights.
func TestSecurity(t *testing.T) {
	each(t, func(t *testing.T, m manifests) {
		pod, c := object[appsv1.StatefulSet](t, m, "weir").Spec.Template.Spec, m.node(t)
		s := pod.SecurityContext
		expect(t, s != nil && s.RunAsNonRoot != nil && *s.RunAsNonRoot && s.RunAsUser != nil && *s.RunAsUser != 0 &&
			s.SeccompProfile != nil && s.SeccompProfile.Type == corev1.SeccompProfileTypeRuntimeDefault,
			"the pod's security context is %+v", s)
		if s := c.SecurityContext; s == nil || s.AllowPrivilegeEscalation == nil || *s.AllowPrivilegeEscalation ||
			s.ReadOnlyRootFilesystem == nil || !*s.ReadOnlyRootFilesystem ||
			s.Capabilities == nil || !slices.Equal(s.Capabilities.Drop, []corev1.Capability{"ALL"}) ||
			len(s.Capabilities.Add) != 0 {
			t.Errorf("the container's security context is %+v", s)
		}
		for _, v := range pod.Volumes {
			expect(t, v.ConfigMap != nil || v.Secret != nil, "the volume %s is neither a ConfigMap nor a Secret",
				v.Name)
		}
		account := object[corev1.ServiceAccount](t, m, "weir")
		expect(t, account.AutomountServiceAccountToken != nil && !*account.AutomountServiceAccountToken &&
			pod.AutomountServiceAccountToken != nil && !*pod.AutomountServiceAccountToken &&
			pod.ServiceAccountName == account.Name, "pods get a token for the API server, or run as another account")
		expect(t, pod.EnableServiceLinks != nil && !*pod.EnableServiceLinks, "Services may set WEIR_ variables")
		r := c.Resources
		expect(t, !r.Requests.Cpu().IsZero() && !r.Requests.Memory().IsZero() && !r.Limits.Memory().IsZero() &&
			r.Limits.Cpu().IsZero(), "the resources are %+v, want requests, and a limit of memory alone", r)
	})
}

// Gossip and the port between nodes are open to nodes and to nobody else; whoever may connect, does so to a port there
// is.
func TestNetworkPolicy(t *testing.T) {
	each(t, func(t *testing.T, m manifests) {
		set, container := object[appsv1.StatefulSet](t, m, "weir"), containerPorts(t, m)
		open := make(map[string]bool)
		np := object[networkingv1.NetworkPolicy](t, m, "weir")
		expect(t, slices.Contains(np.Spec.PolicyTypes, networkingv1.PolicyTypeIngress), "ingress is not limited")
		for i, rule := range np.Spec.Ingress {
			expect(t, len(rule.Ports) != 0 && len(rule.From) != 0, "ingress[%d] lets everything or everybody in: %+v",
				i, rule)
			nodes := len(rule.From) > 0
			for _, from := range rule.From {
				nodes = nodes && from.NamespaceSelector == nil && from.IPBlock == nil && from.PodSelector != nil &&
					maps.Equal(from.PodSelector.MatchLabels, set.Spec.Selector.MatchLabels)
			}
			for _, p := range rule.Ports {
				target, ok := container[p.Port.String()]
				expect(t, ok && p.Protocol != nil && *p.Protocol == protocol(target.Protocol),
					"ingress[%d]: there is no port %+v", i, p)
				open[target.Name] = true
				expect(t, target.Name == "http" || target.Name == "grpc" || nodes,
					"ingress[%d] opens %s to others than nodes", i, target.Name)
			}
		}
		expect(t, len(open) == len(container),
			"only %v are reachable of %v", slices.Sorted(maps.Keys(open)), slices.Sorted(maps.Keys(container)))
	})
}

// mounted finds the volume that holds the file, and the file's name in it.
func mounted(t *testing.T, m manifests, file string) (corev1.Volume, string) {
	t.Helper()
	dir, name := filepath.Split(file)
	for _, mount := range m.node(t).VolumeMounts {
		if mount.MountPath != filepath.Clean(dir) {
			continue
		}
		expect(t, mount.SubPath == "" && mount.SubPathExpr == "", "%s: a file mounted by subPath never changes",
			mount.MountPath)
		expect(t, mount.ReadOnly, "%s can be written to", mount.MountPath)
		for _, v := range object[appsv1.StatefulSet](t, m, "weir").Spec.Template.Spec.Volumes {
			if v.Name == mount.Name {
				return v, name
			}
		}
	}
	t.Fatalf("%s is on no volume", file)
	panic("unreachable")
}

func TestPolicies(t *testing.T) {
	each(t, func(t *testing.T, m manifests) {
		volume, name := mounted(t, m, podSettings(t, m.node(t))["policies"])
		must(t, volume.ConfigMap != nil, "the policies are on the volume %+v", volume)
		text, ok := object[corev1.ConfigMap](t, m, volume.ConfigMap.Name).Data[name]
		must(t, ok, "--policies names %s, which is not in the ConfigMap", name)
		validate(t, text)
	})
}

// Every setting is one of the binary's, every file one that the pod has, and every volume is for a file.
func TestSettings(t *testing.T) {
	each(t, func(t *testing.T, m manifests) {
		c := m.node(t)
		s := podSettings(t, c)
		s.takes(t)
		ports := make(map[string]string)
		for name, p := range containerPorts(t, m) {
			ports[name] = strconv.Itoa(int(p.ContainerPort))
		}
		for name, want := range map[string]string{
			"http-port": ports["http"], "grpc-port": ports["grpc"], "gossip-port": ports["gossip-tcp"],
			"peer-port": ports["peer"],
			"join":      object[corev1.Service](t, m, "weir-headless").Name + ":" + ports["gossip-tcp"],
			"name":      podFields["metadata.name"], "advertise": podFields["status.podIP"],
		} {
			expect(t, s[name] == want, "--%s is %q, want %q", name, s[name], want)
		}
		expect(t, ports["gossip-tcp"] == ports["gossip-udp"], "gossip takes the same port of TCP and UDP")
		used := make(map[string]bool)
		for name, value := range s {
			if strings.HasSuffix(name, "-file") || name == "policies" {
				volume, _ := mounted(t, m, value)
				used[volume.Name] = true
			}
		}
		set := object[appsv1.StatefulSet](t, m, "weir").Spec
		volumes, claims := set.Template.Spec.Volumes, set.VolumeClaimTemplates
		expect(t, len(used) == len(volumes) && len(c.VolumeMounts) == len(volumes)+len(claims),
			"settings name files of the volumes %v; there are %d, %d of them mounted", slices.Sorted(maps.Keys(used)),
			len(volumes), len(c.VolumeMounts))
		if voters, ok := strings.CutPrefix(s["voters"], "ordinals:"); ok {
			n, _ := strconv.Atoi(voters)
			r := object[appsv1.StatefulSet](t, m, "weir").Spec.Replicas
			expect(t, r == nil || int(*r) >= n, "%d voters among too few replicas", n)
		}
	})
}

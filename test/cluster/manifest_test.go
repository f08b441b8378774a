package clustertest

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"

	"go.yaml.in/yaml/v3"

	"github.com/weirlimit/weir/test/must"
)

// What a rehearsal needs to know of the manifests in deploy/k8s/base. That these are right in the eyes of Kubernetes is
// tested there, in a module that has its types; this one does without them.
type (
	statefulSet struct {
		Metadata struct{ Name string }
		Spec     struct {
			ServiceName         string `yaml:"serviceName"`
			Replicas            int
			PodManagementPolicy string `yaml:"podManagementPolicy"`
			MinReadySeconds     int    `yaml:"minReadySeconds"`
			Template            struct{ Spec podSpec }
		}
	}
	podSpec struct {
		TerminationGracePeriodSeconds int `yaml:"terminationGracePeriodSeconds"`
		SecurityContext               struct {
			RunAsUser  int `yaml:"runAsUser"`
			RunAsGroup int `yaml:"runAsGroup"`
		} `yaml:"securityContext"`
		Containers []container
	}
	container struct {
		Args  []string
		Env   []variable
		Ports []struct {
			Name          string
			ContainerPort int `yaml:"containerPort"`
		}
		StartupProbe   probe `yaml:"startupProbe"`
		LivenessProbe  probe `yaml:"livenessProbe"`
		ReadinessProbe probe `yaml:"readinessProbe"`
		Lifecycle      struct {
			PreStop struct{ Sleep struct{ Seconds int } } `yaml:"preStop"`
		}
		VolumeMounts []struct {
			MountPath string `yaml:"mountPath"`
		} `yaml:"volumeMounts"`
	}
	variable struct {
		Name, Value string
		ValueFrom   struct {
			FieldRef struct {
				FieldPath string `yaml:"fieldPath"`
			} `yaml:"fieldRef"`
		} `yaml:"valueFrom"`
	}
	probe struct {
		HTTPGet struct {
			Path, Port string
		} `yaml:"httpGet"`
		PeriodSeconds    int `yaml:"periodSeconds"`
		TimeoutSeconds   int `yaml:"timeoutSeconds"`
		FailureThreshold int `yaml:"failureThreshold"`
	}
	disruptionBudget struct {
		Spec struct {
			MaxUnavailable int `yaml:"maxUnavailable"`
		}
	}
	configMap struct{ Data map[string]string }
)

// manifest reads one of them.
func manifest[T any](t *testing.T, file string) (v T) {
	t.Helper()
	data := must.Value(os.ReadFile(filepath.Join("../../deploy/k8s/base", file)))(t)
	must.NoError(t, yaml.NewDecoder(bytes.NewReader(data)).Decode(&v), "%s", file)
	return v
}

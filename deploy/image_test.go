package deploy

import (
	"encoding/json"
	"fmt"
	"maps"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	"sigs.k8s.io/yaml"
)

// The image is built for what the pods ask of it.
func TestDockerfile(t *testing.T) {
	data := string(readFile(t, "../Dockerfile"))
	release := regexp.MustCompile(`(?m)^go (\d+\.\d+)`).FindSubmatch(readFile(t, "../go.mod"))
	expect(t, release != nil && strings.Contains(data, " golang:"+string(release[1])+" "),
		"the Dockerfile does not build with the Go of go.mod, %s", release)
	expect(t, strings.Contains(data, "CGO_ENABLED=0") && strings.Contains(data, "\nFROM scratch\n"),
		"the image is not one static binary")
	var exposed, user []string
	for line := range strings.Lines(data) {
		switch f := strings.Fields(line); {
		case len(f) > 1 && f[0] == "EXPOSE":
			exposed = append(exposed, f[1:]...)
		case len(f) > 1 && f[0] == "USER":
			user = f[1:]
		}
	}
	base := kustomize(t, "k8s/base")
	var want []string
	for _, p := range base.node(t).Ports {
		want = append(want, fmt.Sprintf("%d/%s", p.ContainerPort, strings.ToLower(string(protocol(p.Protocol)))))
	}
	slices.Sort(exposed)
	slices.Sort(want)
	expect(t, slices.Equal(exposed, want), "the image exposes %q, the container's ports are %q", exposed, want)
	s := object[appsv1.StatefulSet](t, base, "weir").Spec.Template.Spec.SecurityContext
	id := fmt.Sprintf("%d:%d", *s.RunAsUser, *s.RunAsGroup)
	expect(t, len(user) == 1 && user[0] == id, "the image runs as %q, the pods as %s", user, id)
}

// The chart's appVersion is the one place that names the version of a release.
func TestVersions(t *testing.T) {
	var chart struct{ Version, AppVersion string }
	noError(t, yaml.Unmarshal(readFile(t, "helm/weir/Chart.yaml"), &chart))
	expect(t, "v"+chart.Version == chart.AppVersion, "the chart's version is %s, its appVersion %s", chart.Version,
		chart.AppVersion)
	for _, where := range []struct{ file, holds string }{
		{"k8s/base/kustomization.yaml", "newTag: " + chart.AppVersion + "\n"},
		{"k8s/overlays/production/kustomization.yaml", "newTag: " + chart.AppVersion + "\n"},
		{"../CHANGELOG.md", "# Changelog\n\n## " + chart.Version + " "},
	} {
		expect(t, strings.Contains(string(readFile(t, where.file)), where.holds), "%s does not hold %q", where.file,
			where.holds)
	}
}

// The build gets a version, and none of the directories that it is kept from is one that the binary is made of.
func TestBuildContext(t *testing.T) {
	name := filepath.Join(t.TempDir(), "weir")
	linked := regexp.MustCompile(`-ldflags "([^"]*)"`).FindStringSubmatch(string(readFile(t, "../Dockerfile")))
	must(t, linked != nil, "the Dockerfile does not say which version it builds")
	output(t, "go", "build", "-C", "..", "-ldflags", strings.NewReplacer("$VERSION", "v1.2.3", "$COMMIT",
		"0123456789abcdef").Replace(linked[1]), "-o", name, "./cmd/node")
	if got := output(t, name, "--version"); !strings.Contains(got, "v1.2.3 (commit 0123456789ab,") {
		t.Errorf("a build that is told v1.2.3 and 0123456789abcdef says %q", got)
	}

	ignored := strings.Fields(regexp.MustCompile(`(?m)^#.*$`).ReplaceAllString(string(readFile(t, "../.dockerignore")),
		""))
	root, err := filepath.Abs("..")
	noError(t, err)
	list := exec.Command("go", "list", "-C", "..", "-deps", "-json=Dir,Standard,Module,GoFiles,EmbedFiles",
		"./cmd/node")
	for dec := json.NewDecoder(strings.NewReader(finish(t, list))); dec.More(); {
		var p struct {
			Dir                 string
			Standard            bool
			Module              *struct{ Main bool }
			GoFiles, EmbedFiles []string
		}
		noError(t, dec.Decode(&p))
		if p.Standard || p.Module == nil || !p.Module.Main {
			continue
		}
		for _, f := range slices.Concat(p.GoFiles, p.EmbedFiles) {
			file, err := filepath.Rel(root, filepath.Join(p.Dir, f))
			noError(t, err)
			for _, pattern := range ignored {
				below, dir := strings.CutPrefix(pattern, "/")
				match, err := filepath.Match(strings.TrimPrefix(pattern, "**/"), filepath.Base(file))
				expect(t, err == nil && !match && (!dir || !strings.HasPrefix(file, below+"/")),
					".dockerignore keeps %s from the build by %s (%v)", file, pattern, err)
			}
		}
	}
}

// composition is what compose.yaml uses of Compose's format.
type composition struct {
	Services map[string]struct {
		Image string `json:"image"`
		Build *struct {
			Context string            `json:"context"`
			Args    map[string]string `json:"args"`
		} `json:"build"`
		Command         []string          `json:"command"`
		StopGracePeriod string            `json:"stop_grace_period"`
		Restart         string            `json:"restart"`
		MemLimit        string            `json:"mem_limit"`
		ReadOnly        bool              `json:"read_only"`
		CapDrop         []string          `json:"cap_drop"`
		SecurityOpt     []string          `json:"security_opt"`
		Environment     map[string]string `json:"environment"`
		Volumes         []string          `json:"volumes"`
		Ports           []string          `json:"ports"`
		DependsOn       []string          `json:"depends_on"`
		Healthcheck     *struct {
			Test        []string `json:"test"`
			Interval    string   `json:"interval"`
			Timeout     string   `json:"timeout"`
			Retries     int      `json:"retries"`
			StartPeriod string   `json:"start_period"`
		} `json:"healthcheck"`
	} `json:"services"`
	Volumes  map[string]any `json:"volumes"`
	Node     any            `json:"x-node"`
	Settings any            `json:"x-settings"`
	Policies any            `json:"x-policies"`
}

func compose(t *testing.T) composition {
	t.Helper()
	var c composition
	strictly(t, readFile(t, "../compose.yaml"), &c)
	return c
}

// nodes are the services of Compose that run the binary, in order.
func (c composition) nodes() []string {
	return slices.DeleteFunc(slices.Sorted(maps.Keys(c.Services)),
		func(s string) bool { return c.Services[s].Build == nil })
}

func TestCompose(t *testing.T) {
	c := compose(t)
	base := containerPorts(t, kustomize(t, "k8s/base"))
	nodes := c.nodes()
	must(t, len(nodes) == 3, "the nodes are %q", nodes)
	published := make(map[string]bool)
	var join []string
	for _, name := range nodes {
		join = append(join, fmt.Sprintf("%s:%d", name, base["gossip-tcp"].ContainerPort))
	}
	for _, name := range nodes {
		n := c.Services[name]
		s := settingsOf(n.Environment)
		s.takes(t)
		expect(t, s["name"] == name && s["advertise"] == name && s["join"] == strings.Join(join, ","),
			"%s: the settings are %v, want its own name and to join %q", name, s, join)
		expect(t, slices.Equal(n.Command, []string{"run"}) && n.ReadOnly && slices.Equal(n.CapDrop, []string{"ALL"}),
			"%s: %+v", name, n)
		grace, err := time.ParseDuration(s["grace"])
		expect(t, err == nil, "%s: --grace: %v", name, err)
		if stop, err := time.ParseDuration(n.StopGracePeriod); err != nil || stop < grace+5*time.Second {
			t.Errorf("%s: is killed after %v (%v), and may take %v", name, stop, err, grace)
		}
		if len(n.Healthcheck.Test) < 2 || n.Healthcheck.Test[0] != "CMD" || n.Healthcheck.Test[1] != "/weir" {
			t.Errorf("%s: the health check %q is not one of the image's one program", name, n.Healthcheck.Test)
		} else if out, err := runWeir(t, append(slices.Clone(n.Healthcheck.Test[2:]), "--help")...); err != nil {
			t.Errorf("%s: the health check: %v\n%s", name, err, out)
		}
		from, to, _ := strings.Cut(strings.TrimSuffix(n.Volumes[0], ":ro"), ":")
		expect(t, len(n.Volumes) == 2 && to == filepath.Dir(s["policies"]) && n.Volumes[1] == name+":"+s["data-dir"],
			"%s: the volumes are %q, --policies %s, --data-dir %s", name, n.Volumes, s["policies"], s["data-dir"])
		validate(t, string(readFile(t, filepath.Join("..", from, filepath.Base(s["policies"])))))
	}
	for name, s := range c.Services {
		for _, p := range s.Ports {
			host, inside, _ := strings.Cut(strings.TrimPrefix(p, "127.0.0.1:"), ":")
			expect(t, strings.HasPrefix(p, "127.0.0.1:") && !published[host],
				"%s: port %s is published beyond this machine, or twice", name, p)
			published[host] = true
			expect(t, s.Build == nil || inside == fmt.Sprint(base["http"].ContainerPort) ||
				inside == fmt.Sprint(base["grpc"].ContainerPort), "%s: port %s is not one for callers", name, p)
		}
		for _, v := range s.Volumes {
			from, _, _ := strings.Cut(v, ":")
			if _, ok := c.Volumes[from]; ok {
				continue
			}
			expect(t, strings.HasSuffix(v, ":ro"), "%s: %s can be written to", name, v)
			matches, err := filepath.Glob(filepath.Join("..", from))
			expect(t, err == nil && len(matches) == 1, "%s: there is no %s", name, from)
		}
		_, tag, ok := strings.Cut(s.Image, ":")
		expect(t, ok && tag != "latest", "%s: the image %s is not pinned", name, s.Image)
	}
}

// Prometheus scrapes every node, as the job that alerts and dashboard ask for, and Grafana finds both.
func TestComposeMonitoring(t *testing.T) {
	var p struct {
		Global    map[string]string `json:"global"`
		RuleFiles []string          `json:"rule_files"`
		Scrape    []struct {
			Job    string `json:"job_name"`
			Static []struct {
				Targets []string `json:"targets"`
			} `json:"static_configs"`
		} `json:"scrape_configs"`
	}
	strictly(t, readFile(t, "compose/prometheus.yml"), &p)
	c := compose(t)
	var want []string
	for _, name := range c.nodes() {
		want = append(want, fmt.Sprintf("%s:%d", name,
			containerPorts(t, kustomize(t, "k8s/base"))["http"].ContainerPort))
	}
	expect(t, len(p.Scrape) == 1 && p.Scrape[0].Job == "weir" && len(p.Scrape[0].Static) == 1 &&
		slices.Equal(p.Scrape[0].Static[0].Targets, want), "Prometheus scrapes %+v, want %q as the job weir", p.Scrape,
		want)
	inside := func(service, file string) string {
		for _, v := range c.Services[service].Volumes {
			if f := strings.Split(v, ":"); len(f) > 1 && f[1] == file {
				return filepath.Join("..", f[0])
			}
		}
		t.Errorf("%s has no %s", service, file)
		return ""
	}
	for _, f := range p.RuleFiles {
		got := inside("prometheus", "/etc/prometheus/"+f)
		expect(t, got == "../deploy/monitoring/alerts.yaml", "Prometheus has the rules %s", got)
	}
	got := inside("prometheus", "/etc/prometheus/prometheus.yml")
	expect(t, got == "../deploy/compose/prometheus.yml", "Prometheus has the configuration %s", got)

	var sources struct {
		APIVersion  int `json:"apiVersion"`
		Datasources []struct {
			Name, Type, Access, URL string
			IsDefault               bool           `json:"isDefault"`
			JSONData                map[string]any `json:"jsonData"`
		} `json:"datasources"`
	}
	noError(t, yaml.Unmarshal(readFile(t, inside("grafana", "/etc/grafana/provisioning/datasources/weir.yaml")),
		&sources))
	d := sources.Datasources
	expect(t, len(d) == 1 && d[0].Type == "prometheus" && d[0].URL == "http://prometheus:9090" && d[0].IsDefault &&
		d[0].JSONData["timeInterval"] == p.Global["scrape_interval"], "Grafana's sources are %+v", d)
	var providers struct {
		Providers []struct {
			Type    string
			Options struct{ Path string }
		} `json:"providers"`
	}
	noError(t, yaml.Unmarshal(readFile(t, inside("grafana", "/etc/grafana/provisioning/dashboards/weir.yaml")),
		&providers))
	home := c.Services["grafana"].Environment["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
	expect(t, len(providers.Providers) == 1 && providers.Providers[0].Options.Path == filepath.Dir(home) &&
		inside("grafana", home) == "../deploy/monitoring/dashboard.json", "Grafana's dashboards are %+v, its home %s",
		providers.Providers, home)
}

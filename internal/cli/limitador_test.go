package cli

import (
	"testing"

	"github.com/weirlimit/weir/gateway/envoy"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

const limits = `---
- namespace: test_namespace
  max_value: 10
  seconds: 60
  conditions:
    - "descriptors[0]['req.method'] == 'GET'"
    - "descriptors[0]['req.path'] != '/json'"
  variables: []
- namespace: test_namespace
  name: json
  max_value: 50000
  seconds: 10
  conditions:
    - "descriptors[0]['req.method'] == 'GET'"
    - descriptors[0]["req.path"] == "/json"
- namespace: test_namespace
  max_value: 3
  seconds: 3600
  conditions: ["req.method == 'POST'", "req.path != '/json'"]
  variables: [user_id]
- namespace: other
  max_value: 0
  seconds: 1
  variables: ["descriptors[0].app"]
`

const converted = `domain: test_namespace
charge: all_or_none
descriptors:
    - key: req.method
      value: GET
      descriptors:
        - key: req.path
          value: /json
          rate_limit:
            name: json
            unit: second
            unit_multiplier: 10
            requests_per_unit: 50000
        - key: req.path
          value: '*'
          share_threshold: true
          rate_limit:
            unit: minute
            requests_per_unit: 10
    - key: req.method
      value: POST
      descriptors:
        - key: req.path
          value: /json
          rate_limit:
            unlimited: true
        - key: req.path
          value: '*'
          share_threshold: true
          descriptors:
            - key: user_id
              rate_limit:
                unit: hour
                requests_per_unit: 3
`

// TestConvertLimitador: what is written is what gateway/envoy takes.
func TestConvertLimitador(t *testing.T) {
	expect.True(t, looksLikeLimitador([]byte(limits)) && !looksLikeLimitador([]byte("policies: []")) && !looksLikeLimitador(nil), "files are not told apart")
	f := must.Value(parseLimitador("limits.yaml", []byte(limits)))(t)
	expect.True(t, f.Limits == 4 && len(f.Namespaces) == 2 && f.Namespaces[1].FileName() == "other.yaml", "%+v", f)
	var files []envoy.File
	for i := range f.Namespaces {
		text := must.Value(f.Namespaces[i].Envoy())(t)
		expect.True(t, i != 0 || string(text) == converted, "converted:\n%s", text)
		files = append(files, envoy.File{Name: f.Namespaces[i].FileName(), Data: text})
	}
	config := must.Value(envoy.Parse(files, envoy.Options{}))(t)
	domains, limits := config.Domains()
	expect.True(t, domains == 2 && limits == 5, "%d limits of %d domains", limits, domains)
}

func TestMistakes(t *testing.T) {
	for in, want := range map[string]string{
		"- {namespace: n, max_value: 1, seconds: 60}":                                                                             "1:3: [0]: has neither conditions nor variables",
		"- {namespace: n, max_value: 1, variables: [a]}":                                                                          "1:3: [0].seconds: is missing: add it, such as seconds: 60",
		"- {max_value: 1, seconds: 1, variables: [a]}":                                                                            "1:3: [0].namespace: is missing",
		"- {namespace: n, max_value: -1, seconds: 60, variables: [a]}":                                                            "[0].max_value: ",
		"- {namespace: n, max_value: 1, seconds: 0, variables: [a]}":                                                              "[0].seconds: ",
		"- {namespace: '', max_value: 1, seconds: 1, variables: [a]}":                                                             "[0].namespace: must not be empty",
		"- {namespace: n, max_value: 1, seconds: 1, variables: a}":                                                                "[0].variables: must be a list",
		"- {namespace: n, max_value: 1, seconds: 1, variables: [1]}":                                                              "[0].variables[0]: must be text",
		"- {namespace: n, max_value: 1, seconds: 1, variables: ['size(a)']}":                                                      "[0].variables[0]: is not understood",
		"- {namespace: n, max_value: 1, seconds: 1, conditions: [\"a.startsWith('b')\"]}":                                         "[0].conditions[0]: is not understood",
		"- {namespace: n, max_value: 1, seconds: 1, variable: [a]}":                                                               "[0].variable: ",
		"- {namespace: n, max_value: 1, seconds: 1, variables: [a]}\n- {namespace: n, max_value: 9, seconds: 60, variables: [a]}": "2:3: [1]: has the conditions and variables of the limit in line 1",
		"- {namespace: n, max_value: 1, seconds: 1, conditions: [\"a == 'b*'\"]}":                                                 "[0].conditions[0]: cannot be said in Envoy's format",
		"namespace: n": "must be a list of limits, not a map",
		"- 7":          "1:3: [0]: ",
		"- {":          "limits.yaml:",
	} {
		f, err := parseLimitador("limits.yaml", []byte(in))
		expect.ErrorContains(t, err, want, "%s: %v", in, f)
	}
	f, err := parseLimitador("limits.yaml", nil)
	expect.True(t, err == nil && f.Limits == 0, "an empty file: %v, %v", f, err)
}

// FuzzParse: what is taken can be written.
func FuzzParse(f *testing.F) {
	f.Add(limits)
	f.Fuzz(func(t *testing.T, text string) {
		file, err := parseLimitador("limits.yaml", []byte(text))
		if err != nil {
			return
		}
		for i := range file.Namespaces {
			_, err := file.Namespaces[i].Envoy()
			must.NoError(t, err)
		}
	})
}

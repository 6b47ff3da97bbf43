//go:build tools

package main

// Kept in go.mod for controller-gen, which reads these types.
import _ "volcano.sh/apis/pkg/apis/scheduling/v1beta1"
